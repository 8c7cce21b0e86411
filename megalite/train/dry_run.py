"""`--dry-run`: everything that can be known and checked before a process or a tensor exists."""

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megalite.checkpoint import check_names, check_space, lock_of, read_manifest, verify_checkpoint, without_gc
from megalite.comm import Axis, ContextAxes
from megalite.config import (
    USUAL_VOCABULARIES,
    Config,
    DataConfig,
    Float8,
    dump_yaml,
    meant_for_this_host,
    missing_data,
    missing_packages,
    missing_tokenizer,
    missing_trackers,
)
from megalite.data import Dataset, Datasets, Tokenizer, is_indexed
from megalite.errors import CheckpointError, ConfigError
from megalite.launch import check_devices
from megalite.observe import RUN_FILES
from megalite.planner import (
    NO_ROOM,
    TOO_SMALL,
    Roofline,
    checkpoint_bytes,
    float8_problems,
    format_table,
    hardware_of,
    predict,
    within_budget,
)
from megalite.progress import ProgressBar, amount, duration
from megalite.schedule import Program, render_text, simulate
from megalite.stores import Place
from megalite.train.announcement import as_read, judge, pools_of, rows_of
from megalite.train.build import parameter_dtype
from megalite.train.foreign import ForeignModel
from megalite.train.kept_activations import UnseenGpu
from megalite.train.param_schedules import resolve_schedules
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from megalite.train.run_data import cache_of, changed_data, open_datasets, resolve_tokenizer, warn_of_talks
from megalite.train.run_directory import CONFIG_FILE, RunDirectory
from megalite.train.starting_point import other_ids

logger = logging.getLogger(__name__)

WIDEST = 100
LONGEST_TEXT = 1 << 26  # bytes of raw text that are tokenised to check them; the start does it for more
LARGEST_CHECKPOINT = 1 << 34  # bytes of a checkpoint that are read to check them


class HostTooSmall(ConfigError):
    """The ranks of a run do not fit into this host."""


def dry_run(config: Config, origins: Mapping[str, str], world_size: int, gpu: UnseenGpu | None = None) -> str:
    """The text that `--dry-run` prints. Nothing is written but the tokens of a raw text, which the run will
    read. gpu: one without values, on which blocks say what they keep. Raises MegaliteError.

    A run that does not fit into a host without GPUs is one for GPUs elsewhere, unless `--device cpu` says otherwise.
    """
    here = meant_for_this_host(world_size)
    why = f"{world_size} ranks are not meant for this host"
    try:
        return _dry_run(config, origins, world_size, here, why, gpu)
    except HostTooSmall as error:
        if config.parallel.hardware.device == "cpu" or torch.cuda.is_available():
            raise
        logger.warning(
            str(error).partition(";")[0]
            + "; planned for GPUs elsewhere, whose needs differ (memory, below); `device` cpu plans for this host"
        )
        ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
        return _dry_run(config, origins, world_size, False, f"{ranks} not fit into this host", gpu)


def _dry_run(
    config: Config, origins: Mapping[str, str], world_size: int, here: bool, why: str, gpu: UnseenGpu | None
) -> str:
    """why: the run is not meant for this host."""
    config, tokenizer = resolve_tokenizer(config) if here else without_files(config)
    on_cpu = config.parallel.hardware.device == "cpu" or (here and not torch.cuda.is_available())
    plan = within_budget(config, world_size, on_cpu=on_cpu)
    programs = ProgramCache(config, plan)
    with without_gc():  # a program of thousands of ranks is millions of small tuples, none of them in a cycle
        programs.prove(world_size, Axis.single("world"))
    program = programs.full(world_size)
    if not on_cpu and (odd := list(float8_problems(config))):
        raise ConfigError(odd)
    foreign = None
    if config.model.is_foreign:  # without values where its factory allows it
        context = config.parallel.context
        sizes = {"tp": config.parallel.tensor_model_parallel_size, "cp_heads": context.traders, "cp_ring": context.ring}
        tp, *cp = (Axis(name, size, 0, tuple(range(size))) for name, size in sizes.items())  # that connect nobody
        device, dtype = torch.device("meta"), parameter_dtype(config)
        foreign = ForeignModel(config, tp, program, device, dtype, ContextAxes(cp[0], cp[1]), probe=False)
    planned = as_read(PlannedRun.before(config, world_size, program, plan, foreign, on_cpu=on_cpu), gpu)
    notes = [f" not checked: devices, memory, data, `load` and `save` ({why})"]
    notes += [f" not here    {line}" for line in (*missing_data(config), *missing_packages(config))]
    device_name = torch.cuda.get_device_name() if here and not on_cpu else ""
    if here:
        check_devices(config.parallel, config.parallel.nprocs or 1)
        check_local_memory(planned)
        config, notes = check_start(config, world_size, tokenizer)
    notes += [f" warning: {line}" for line in missing_trackers(config)]
    table = rows_of(replace(planned, config=config), "CPU" if on_cpu else "GPU")
    table += [
        ("time", time_text(config, world_size, device_name, here=here)),
        ("tokenizer", tokenizer_text(config, tokenizer)),
    ]
    every = config.training.dry_run_all
    head = "every setting" if every else "settings that are not defaults (all of them: `dry_run` all)"
    parts = [f"# {head}", dump_yaml(config, origins, every=every), format_table(table), *notes]
    if program.num_ranks > 1:
        parts += ["", *drawn(program, *programs.shown(world_size))]
    if world_size > 1:
        parts += [
            "",
            f" Without a GPU: tools/rehearse.py, these flags and `num_devices` {world_size} run each rank's code.",
        ]
    unsure = any(line.startswith((" not checked", " not here", " warning")) for line in notes)
    but = " but for what the lines above leave open" if unsure else ""
    start = "the same command without `dry_run` starts the run"
    if not here:  # one command starts the ranks of one host
        both = " and `nprocs`" if config.parallel.nprocs is not None else ""
        start = f"the same flags without `dry_run`{both} start it on its hosts (docs/launch.md)"
        room = " ".join(text for _, text in table)
        if NO_ROOM in room:  # status 0 all the same: a device that is not known may have it
            fix = "share the model among more ranks, or use a smaller one"
            return "\n".join([*parts, "", f" A problem: no known device has room for a rank (room, above); {fix}."])
        but += ", and devices that are too small (room)" * (TOO_SMALL in room)
    return "\n".join([*parts, "", f" No problem found{but}: {start}."])


def time_text(config: Config, world_size: int, device_name: str, *, here: bool = True) -> str:
    """What a step and the training are predicted to take on devices of that name (empty: a CPU). here: the ranks are
    meant for this host."""
    hardware = hardware_of(device_name) if device_name and not config.model.is_foreign else None
    if not here:
        return f"not known; tools/plan.py predicts it, with `num_devices` {world_size} and a `hardware`"
    if hardware is None:
        return "not known for this hardware; the run says how much is left in each of its lines"
    seconds, beside = predict(config, world_size, hardware, Roofline(hardware)).step_time, ""
    if config.training.float8.fp8_format is not None:
        wide = replace(config, training=replace(config.training, float8=Float8()))
        other = predict(wide, world_size, hardware, Roofline(hardware)).step_time
        beside = f"; without `fp8_format` {other / seconds:.2f} times that"
    whole = duration(seconds * config.train_iterations(world_size))
    step = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{step} a step, {whole} in all (predicted for {hardware.name}, without evaluations{beside})"


def tokenizer_is_elsewhere(config: Config) -> bool:
    """Whether its files, or those of the data from which it is made or known, are not on this host."""
    data = config.data
    return any(missing_tokenizer(config) if data.tokenizer_model or data.vocab_file else missing_data(config))


def without_files(config: Config) -> tuple[Config, Tokenizer]:
    """The tokenizer and its vocabulary; where its files, or those of the data, are on another host alone, as many
    numbers. Raises DataError for files that are no tokenizer."""
    data = config.data
    if not tokenizer_is_elsewhere(config):
        return resolve_tokenizer(config)
    inferred = "GPT2BPETokenizer" if data.vocab_file or data.merge_file else "HuggingFaceTokenizer"
    kind = data.tokenizer_type or (inferred if data.vocab_file or data.merge_file or data.tokenizer_model else None)
    numbers = DataConfig(mock_data=True, tokenizer_type=kind)
    if numbers.stand_in_ids(config.model.vocab_size) == 0:
        size, whose = USUAL_VOCABULARIES[str(kind)]
        logger.warning(
            "`tokenizer_model`=%s: not on this host; %s tokens are assumed, %s number: give `vocab_size` if it has "
            "others",
            data.tokenizer_model, f"{size:,}", whose,
        )  # fmt: skip
        config = replace(config, model=replace(config.model, vocab_size=size))
    settled, tokenizer = resolve_tokenizer(replace(config, data=numbers))
    return replace(settled, data=data), tokenizer


def tokenizer_text(config: Config, tokenizer: Tokenizer) -> str:
    """What the tokenizer is. tokenizer: numbers, where that of the run is on another host."""
    named = config.data.tokenizer_type
    if tokenizer.kind == named or not tokenizer_is_elsewhere(config):
        return tokenizer.describe()
    which = f"{named}, which is" if named else "that of its files, which are"
    return f"{which} not on this host; {config.model.vocab_size:,} tokens"


def drawn(program: Program, shown: Program, short: list[int] | None) -> list[str]:
    """The lines of the drawing: of one batch, two of an asynchronous program. shown, short: the program and the sizes
    to draw in place of a wide one and of long batches."""
    count, turn = 2 if program.asynchronous else 1, shown.num_ranks * shown.placement.round
    fit = -(-max(2 * turn, WIDEST) // turn) * turn  # micro-batches that fill the width
    short = short and [min(size, fit) for size in short]
    drawing = render_text(simulate(shown, batches=short[:count] if short else count))
    whole = drawing.splitlines()
    lines = [line[:WIDEST].rstrip() for line in whole]
    if max(map(len, whole)) > WIDEST:
        lines.append(f"cut at {WIDEST} columns; tools/show_schedule.py draws all of it")
    if shown.num_ranks < program.num_ranks:
        size = short[0] if short else shown.num_microbatches
        lines.append(
            f"drawn: {shown.num_ranks} ranks and {size} micro-batches; the {program.num_ranks} ranks and "
            f"{program.num_microbatches} micro-batches of the run repeat the middle"
        )
    elif short:
        lines.append(f"drawn: {short[0]} of the {program.num_microbatches} micro-batches; the others repeat the middle")
    return lines


def check_local_memory(run: PlannedRun) -> None:
    """What `check_memory` asks, of ranks that would all start on this host. Raises HostTooSmall."""
    cpu, gpus = torch.device("cpu"), torch.cuda.device_count()
    devices = [cpu if run.on_cpu else torch.device("cuda", rank % gpus) for rank in range(run.world_size)]
    pools = [pools_of(device, rank) for rank, device in enumerate(devices)]
    if problem := judge(run, pools):
        raise HostTooSmall(problem)


def check_start(config: Config, world_size: int, tokenizer: Tokenizer) -> tuple[Config, list[str]]:
    """What the start of a run checks. Returns the settled configuration, and notes of what was not checked."""
    save, notes = config.checkpoint.run_folder, []
    others = {"tensorboard_dir": config.logging.tensorboard_dir, "data_cache_path": config.data.data_cache_path}
    for name, folder in others.items():
        if folder is not None:
            check_writable(name, folder)
    if save is not None and not config.training.skip_train:
        check_writable("save", save)
        check_names(save, (CONFIG_FILE, *RUN_FILES))
        lock_of(str(config.checkpoint.save)).check()
    directory = RunDirectory(config, Axis.single("world"))
    start = directory.start()
    other_ids(start, tokenizer, config)
    config = resolve_schedules(directory.config, world_size, start).config
    if start is not None and start.source is None:
        notes += check_whole(start.path, with_state=not start.weights_only and config.checkpoint.load_optim)
    if save is not None and not config.training.skip_train and not config.model.is_foreign:
        try:
            check_space(save, checkpoint_bytes(config))
        except CheckpointError as error:  # the run may be meant for another host, whose disk has room; a start asks it
            notes.append(f" warning: {error}")
    if any(path.stat().st_size > LONGEST_TEXT for path in raw_texts(config)):
        return config, [*notes, " not checked: raw text, which is tokenised at the start"]
    datasets = open_splits(config, world_size, tokenizer)
    goes_on = start.meta if start is not None and not start.weights_only else {}
    changed_data(goes_on, datasets, config)
    warn_of_talks(config, datasets)
    return config, [*notes, *data_row(config, world_size, datasets)]


def data_row(config: Config, world_size: int, datasets: Datasets) -> list[str]:
    """How much text there is, and how often the training reads it where it is one text."""
    if config.data.mock_data or datasets.phases:
        return []
    sets = {"train": datasets.train, "valid": datasets.valid, **datasets.valid_sets, "test": datasets.test}
    tokens = {name: each.tokens_per_epoch for name, each in sets.items() if isinstance(each, Dataset)}
    parts = {name: f"{count:,} tokens" for name, count in tokens.items()}
    if len(datasets.surveys.get("train", ())) == 1:
        asked = config.total_train_samples(world_size) * config.model.seq_length
        parts["train"] += f", read {asked / tokens['train']:.3g} times"
    return [" data        " + "; ".join(f"{name} {text}" for name, text in parts.items())] if parts else []


def check_whole(path: Place, *, with_state: bool) -> list[str]:
    """Reads what the start would load of a checkpoint, against its checksums; of a large one the sizes of its files
    only. Returns notes of what was not read. Raises CheckpointError."""
    size = sum(stored.nbytes for stored in read_manifest(path).files.values())
    with ProgressBar(f"checking {path.name}", "B") as bar:
        problems = verify_checkpoint(path, with_state=with_state, contents=size <= LARGEST_CHECKPOINT, on_progress=bar)
    if problems:
        raise CheckpointError(problems[0])
    read = size <= LARGEST_CHECKPOINT
    return [] if read else [f" not checked: the contents of {path} ({amount(size, 'B')}), which are read at the start"]


def open_splits(config: Config, world_size: int, tokenizer: Tokenizer) -> Datasets:
    """The data of the run, with the order of one sample each. Nothing is kept but the tokens of a text, where the run
    looks for them."""
    data = config.data
    # A start turns a text into tokens: a file, or the standard library's where nothing is named.
    named = data_words(config) or data.data_args_path or data.data_schedule or data.mock_data
    with tempfile.TemporaryDirectory(prefix="megalite-") as passing:
        cache = cache_of(config) if any(raw_texts(config)) or not named else Path(passing)
        return open_datasets(config, world_size, tokenizer, look=cache)


def data_words(config: Config) -> list[str]:
    data = config.data
    paths = data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path
    return [word for words in paths for word in words or ()]


def raw_texts(config: Config) -> Iterator[Path]:
    """Files named as data that are no .bin/.idx pairs."""
    for word in data_words(config):
        if os.path.isfile(word) and not word.endswith((".bin", ".idx")) and not is_indexed(word):
            yield Path(word)


def check_writable(name: str, folder: str) -> None:
    """Raises CheckpointError where a run could not write a folder that it makes where there is none. name: of the
    setting."""
    existing = Path(folder).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise CheckpointError(f"`{name}`={folder}: {existing} is a file; choose another `{name}`")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise CheckpointError(
            f"`{name}`={folder}: cannot write in {existing} ({error.strerror}); choose another `{name}`"
        ) from None
