"""Do the files that a configuration names exist on this machine, and can --save be a directory?

Of a schedule file the content is read too: it is small, and what is wrong with it is known before a rank starts.
"""

import difflib
import json
import os
import shlex
import shutil
from collections.abc import Iterator

from megalite.config.data import PATHS, WITHOUT_FILE, DataConfig
from megalite.config.root import Config
from megalite.config.rules.layout import batches_in_micro_batches, recomputed_twice
from megalite.errors import ConfigError, ScheduleError
from megalite.extras import EXTRA_OF, install_command, lacking, lacks
from megalite.files import hub_advice, input_problem, served_url, url_problem
from megalite.schedule import load_program

MAX_WORDS_BYTES = 1 << 20
MOST_JSON_BYTES = 1 << 28


RAW = (".txt", ".md", ".jsonl", ".json", ".gz", ".zst")
"""Endings of texts, which a run tokenises itself; a prefix of .bin and .idx files has none of them."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme of a store -> what reaches it."""
HOST = 8
"""A world of this many ranks may be meant for this host; one that is larger, and has more ranks than cores, is not."""


def meant_for_this_host(world_size: int) -> bool:
    """Whether so many ranks may start here."""
    return world_size <= max(HOST, os.cpu_count() or 1)


def missing_packages(config: Config) -> list[str]:
    """Those by which stores are reached that are named, and the one that carries tokens to experts."""
    found = [(name, config.given[name]) for name in ("load", "save") if name in config.given]
    found += [(name, url) for name in PATHS for url in _paths(getattr(config.data, name))]
    lines = []
    for name, url in found:
        served = served_url(url)
        package = PACKAGES.get(served[0]) if served is not None else None
        if package is not None and lacks(package):
            lines.append(lacking(f"`{name}`={url}", package))
    if config.parallel.experts.moe_token_dispatcher_type == "flex" and lacks("deep_ep"):
        lines.append(lacking("`moe_token_dispatcher_type`=flex", "deep_ep"))
    return lines


def missing_trackers(config: Config) -> Iterator[str]:
    """What would watch the run, and lacks its package: a start warns of it, and trains."""
    packages = {
        "tensorboard_dir": "tensorboard",
        "wandb_project": "wandb",
        "prometheus_port": "prometheus_client",
        "prometheus_file": "prometheus_client",
    }
    for name, package in packages.items():
        if name in config.given and lacks(package):
            needs = f"`{name}`={config.given[name]}: needs the package {package}"
            yield f"{needs}; the training starts without it; {install_command(EXTRA_OF[package])}"


def missing_data(config: Config) -> list[str]:
    """Those of data and tokenizer."""
    return [*_data_files(config), *missing_tokenizer(config)]


def ids_of_files(data: DataConfig) -> int | None:
    """How many ids the tokenizer has whose files are named, counted in the JSON of tokenizer.json or vocab.json; None
    where there is none, or it is of another kind. Raises ConfigError where one is not what its name says."""
    named, folder = data.tokenizer_model, data.tokenizer_model or ""
    names = [] if named is None else [named, os.path.join(folder, "tokenizer.json"), os.path.join(folder, "vocab.json")]
    path = next((name for name in [data.vocab_file, *names] if name and os.path.isfile(name)), None)
    if path is None or not path.endswith(".json"):
        return None
    try:
        if input_problem(path, MOST_JSON_BYTES) is not None:
            return None
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if "model" not in found:  # vocab.json: token -> id
            return int(max(found.values())) + 1
        vocabulary = found["model"]["vocab"]  # token -> id; of Unigram a list
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else [*vocabulary.values()]
        return int(max([*ids, *(token["id"] for token in found.get("added_tokens") or ())])) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"`tokenizer_model`={path}: no tokenizer's vocabulary is in it ({error!r:.80}); give `vocab_size`"
        ) from None


def schedule_file(config: Config, world_size: int) -> Iterator[str]:
    """Is --pipeline-schedule-file a legal schedule, for this run's ranks and micro-batches? The rest must be legal."""
    path, ranks = config.parallel.pipeline_schedule_file, config.parallel.pipeline_model_parallel_size
    if path is None:
        return
    try:
        program = load_program(path)
    except ScheduleError as error:
        yield error.text
        return
    flag = f"`pipeline_schedule_file`={path}"
    if program.num_ranks != ranks:
        yield (
            f"{flag}: is written for {program.num_ranks} ranks, not {ranks}; "
            f"use `pipeline_model_parallel_size`={program.num_ranks}"
        )
    if program.recomputed:
        yield from recomputed_twice(config, flag)
    batches = batches_in_micro_batches(config, world_size)
    others = [(count, samples) for count, samples in batches if count != program.num_microbatches]
    for count, samples in others[:1]:
        fix = f"use `global_batch_size`={samples // count * program.num_microbatches}"
        if len(batches) > 1:
            fix = "a batch size that changes needs a `pipeline_schedule`"
        yield f"{flag}: is written for {program.num_microbatches} micro-batches per batch, not {count}; {fix}"


def _data_files(config: Config) -> Iterator[str]:
    for name in PATHS:
        flag = f"`{name}`"
        paths = _paths(getattr(config.data, name))
        weight = next((path for path in paths if _is_number(path) and not _exists(path)), None)
        if weight is not None and len(paths) > 1:
            yield f"{flag}={' '.join(paths)}: {weight} is no prefix; a blend has a weight before each: 0.7 A 0.3 B"
            continue
        for path in paths:
            if path.endswith((".bin", ".idx")) or os.path.isfile(path) or served_url(path) is not None:
                continue  # a prefix mistaken for a file has its own message; a raw file is tokenised on first use
            missing = [path + ending for ending in (".idx", ".bin") if not os.path.isfile(path + ending)]
            if missing and os.path.isdir(path):
                yield f"{flag}={path}: is a directory; give a file or the prefix of .bin and .idx files"
            elif missing and os.path.splitext(path)[1].lower() in RAW:
                yield f"{flag}={path}: no such file; {_nearest(path) or 'give one that exists'}"
            elif missing:
                fix = _nearest(path) or "run tools/preprocess_data.py"
                yield f"{flag}={path}: {missing[0]} not found (nor a text file {path}); {fix}"


def _nearest(path: str) -> str:
    """A question after the file of data beside `path` whose name is almost the same; empty: there is none."""
    folder, name = os.path.split(path)
    if folder and not os.path.isdir(folder) and not (folder := as_it_is_there(folder)):
        return ""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return ""
    if folder != os.path.dirname(path) and _exists(os.path.join(folder, name)):
        return f"did you mean {os.path.join(folder, name)}?"
    prefixes = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    texts = [name for name in names if os.path.splitext(name)[1].lower() in RAW]
    longer = sorted(each for each in prefixes if each.startswith(f"{name}_"))  # preprocess_data.py appends the key
    alike = difflib.get_close_matches(name, sorted({*prefixes, *texts} - {name}), n=1, cutoff=0.75)
    return "".join(f"did you mean {os.path.join(folder, near)}?" for near in (longer or alike)[:1])


def as_it_is_there(path: str) -> str:
    """The path whose folders and name are almost those of one that does not exist; empty: there is none."""
    folder, name = os.path.split(path.rstrip("/"))
    if folder and not os.path.isdir(folder):
        folder = as_it_is_there(folder)
        if not folder:
            return ""
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.75)
    except OSError:
        return ""
    return os.path.join(folder, near[0]) if near else ""


def _paths(values: tuple[str, ...]) -> list[str]:
    """Leave out the weights of a blend (`0.3 a 0.7 b`)."""
    if len(values) % 2 == 0 and all(_is_number(value) for value in values[::2]):
        return list(values[1::2])
    return list(values)


def _exists(path: str) -> bool:
    return os.path.isfile(path) or os.path.isfile(path + ".idx")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def missing_tokenizer(config: Config) -> Iterator[str]:
    """What is not said of the tokenizer, and its files that are not on this host."""
    if config.data.stand_in_ids(config.model.vocab_size) is None:
        yield from config.data.tokenizer_lacks()
    for name in WITHOUT_FILE:
        path = getattr(config.data, name)
        if path is not None and not os.path.exists(path):
            yield f"`{name}`={path}: no such file{_instead(name, path)}"


def _instead(name: str, path: str) -> str:
    """What to give in place of a tokenizer's file that is not there, where that is known."""
    folder, near = os.path.dirname(path), as_it_is_there(path)
    if near and path.endswith(".json"):
        return f"; did you mean {near}?"
    if os.path.isfile(os.path.join(folder, "tokenizer.json")):
        return (
            f"; {folder or '.'} holds tokenizer.json: `tokenizer_type` HuggingFaceTokenizer, `tokenizer_model` {folder}"
        )
    advice = f"did you mean {near}?" if near else hub_advice(path) if name == "tokenizer_model" else ""
    return f"; {advice}" if advice else ""


def text_without_tokenizer(config: Config, where: str) -> Iterator[str]:
    """Of a run that takes a Hugging Face model at `where` without a tokenizer: does it read text all the same?"""
    data = config.data
    given = [path for name in PATHS for path in _paths(getattr(data, name))]
    text = any(os.path.isfile(path) and not path.endswith((".bin", ".idx")) for path in given)
    if text or not (given or data.lists or data.mock_data):
        yield (
            f"`load`={where}: the directory holds no tokenizer, and the data are text; give `tokenizer_type` and "
            "`tokenizer_model`, or copy the model's tokenizer files there (tokenizer.json; vocab.json and merges.txt; "
            "or tokenizer.model)"
        )


def missing_load(load: str) -> str:
    """The line about a `--load` that is not there."""
    near = as_it_is_there(load)
    advice = f"did you mean {near}? If it has moved, name its new place" if near else hub_advice(load)
    return f"`load`={load}: no such directory; {advice or 'omit `load` to start fresh, or name its new place'}"


def other_files(config: Config) -> Iterator[str]:
    """Those of everything else that a run reads or writes."""
    files = [
        (name, config.given[name]) for name in ("sample_prompts", "pipeline_schedule_file") if name in config.given
    ]
    files += [("eval_task_files", path) for path in config.logging.eval_tasks.eval_task_files]
    for name, path in files:
        if not os.path.isfile(path):
            yield f"`{name}`={path}: no such file"
    if (command := config.logging.on_event) is not None:
        try:
            program = "".join(shlex.split(command)[:1])
            if not program or shutil.which(program) is None:
                yield f"`on_event`={command}: {program or 'it'} is no program on this machine; give its path"
        except ValueError as error:
            yield f"`on_event`={command}: cannot be read ({error}); quote it as for a shell"
    for words, flag in config.data.lists.items():
        if (problem := url_problem(words)) is not None:
            yield f"{flag} {problem}"
        elif not os.path.isfile(words):
            yield f"{flag}: no such file"
        elif input_problem(words) is None:  # what else is wrong with it shows when it is read
            with open(words, encoding="utf-8", errors="replace") as file:
                urls = [(word, url_problem(word, stores=True)) for word in file.read(MAX_WORDS_BYTES).split()]
            yield from (f"{flag}: {word} {problem}" for word, problem in urls if problem is not None)
    folder = config.optimizer.offload.optimizer_offload_path
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        yield f"`optimizer_offload_path`={folder}: is no folder; give one, in which each rank makes its file"
    elif folder is not None and not os.path.isdir(folder):
        yield f"`optimizer_offload_path`={folder}: no such folder; make it first"
    elif folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        yield f"`optimizer_offload_path`={folder}: cannot be written to; give another folder"
    load, save = config.checkpoint.load, config.checkpoint.save
    staging = config.checkpoint.checkpoint_staging_path
    if staging is not None and save is not None and served_url(save) is None:
        yield f"`checkpoint_staging_path`={staging}: `save`={save} is no URL of a store and stages in itself; drop it"
    is_save = load is not None and save is not None and os.path.abspath(load) == os.path.abspath(save)
    if load is not None and not is_save and served_url(load) is None and not os.path.lexists(load):
        yield missing_load(load)  # a file has a message of its own
    folder = config.checkpoint.run_folder
    if save is not None and folder is not None:
        place = os.path.abspath(folder)
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            what = "is no directory" if place == os.path.abspath(folder) else f"{place} is no directory"
            yield f"`save`={save}: {what}; choose another `save`"
