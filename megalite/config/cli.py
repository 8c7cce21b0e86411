"""Command line and files -> a checked `Config`, in one pass that reports every problem.

::

    defaults < family < --config a.yaml < --config b.yaml < flags        (later wins; each value keeps its origin)
                      ^ what --load offers (--use-checkpoint-args); a file or flag that contradicts it is an error

A name given twice at one level under two spellings with different values (`--swiglu --activation gelu`) is an error;
the same name given twice is not: the last one counts, as scripts that append `"$@"` expect.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megalite.config.architecture import Offered, ReadOffer, is_left_open, new_positions
from megalite.config.data import WITHOUT_FILE
from megalite.config.elastic import elastic_problems, elastic_warnings, training_ranks
from megalite.config.files import (
    meant_for_this_host,
    missing_data,
    missing_load,
    missing_packages,
    other_files,
    schedule_file,
    text_without_tokenizer,
)
from megalite.config.legal import config_problems, config_warnings, placeholder
from megalite.config.model import FAMILY_DEFAULTS
from megalite.config.model_parts import OF_MODULES
from megalite.config.names import CONSTANT_FLAGS, EXTRA_OPTIONS
from megalite.config.reader import GivenOption, Reader
from megalite.config.root import SECTIONS, Config, all_options
from megalite.config.rules.foreign import not_with_module
from megalite.config.schema import Option, build_section
from megalite.config.staleness import flushed_start
from megalite.config.usage import usage
from megalite.config.values import as_typed, show
from megalite.config.worked_out import dropped_otherwise, other_defaults, without_a_checkpoint, work_out, work_out_level
from megalite.config.yaml_file import COMMAND_LINE, read_yaml
from megalite.errors import ConfigError, MegaliteError, in_flags
from megalite.files import served_url


@dataclass(frozen=True)
class Parsed:
    """A checked configuration and what is worth telling about it.

    origins: field name -> `default`, `llama family`, `file.yaml:7`, `command line` or `derived`.
    warnings: lines about legal but doubtful settings.
    ignored: flags of Megatron-LM that were given and have no effect here, as they were typed.
    ranks: how many train: those that were started, but with --elastic those that the layout has room for.
    """

    config: Config
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    ranks: int = 1


def parse(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    check_files: bool = True,
    read_offer: ReadOffer | None = None,
) -> Config:
    """The configuration alone of `parse_with_origins`."""
    return parse_with_origins(argv, world_size=world_size, check_files=check_files, read_offer=read_offer).config


def parse_with_origins(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    local_size: int | None = None,
    check_files: bool = True,
    read_offer: ReadOffer | None = None,
) -> Parsed:
    """Read flags and `--config` files into a checked configuration.

    argv: command line without the program's name.
    world_size: ranks that were started; None: `--nprocs`, or 1.
    local_size: how many of them a host has; None: all.
    check_files: whether data and tokenizer files must exist on this machine.
    read_offer: reads what `--load` says of the model; without it `--use-checkpoint-args` is refused.
    Raises ConfigError with all problems, one line each; SystemExit with status 0 after `--help` was printed.
    """
    options = all_options()
    if any(token in ("-h", "--help") for token in argv):
        print(usage(options))
        raise SystemExit(0)
    reader = Reader()
    offered, levels = _with_offer(_read_levels(reader, argv), reader, read_offer)
    merged = _merge(levels, reader)
    ours = _sizes_of_ours(options, {name: given.value for name, given in merged.items()})
    unread = [merged[name] for name in ours if name in merged and _says_more(merged[name])]  # even if it is the default
    found = [*reader.problems, *(not_with_module(_typed(given)) for given in unread)]
    config, origins, missing = _build(reader, merged)
    if offered is not None and offered.architecture and offered.offer.model.is_foreign:
        missing = [name for name in missing if options[name].section != "model"]  # the module is what is missing
    found += [_required(options[name], offered) for name in missing]
    broken = {*reader.broken, *missing}
    checks: list[str] = []
    if offered is not None:
        checks += offered.contradictions(config, options.keys() - broken)
    started = world_size if world_size is not None else (config.parallel.nprocs or 1)
    config, world = _elastic(config, started, started if world_size is None else local_size or started, broken)
    checks += [*config_problems(config, world, broken=frozenset(broken)), *elastic_problems(config, started, world)]
    if check_files:
        # What another host may have, `--dry-run` lists.
        if not config.training.dry_run or meant_for_this_host(world):
            checks += [*missing_data(config), *missing_packages(config)]
        checks += other_files(config)
        if offered is not None and offered.without_tokenizer:
            checks += text_without_tokenizer(config, config.checkpoint.load or str(config.checkpoint.save))
        checks += [] if found or checks else schedule_file(config, world)
    found += [_as_given(_with_place(line, origins), merged) for line in checks]
    if found:
        raise _in_flags(found)
    config, origins = _derive(config, origins, world)
    origins = {name: origins.get(name, "default") for name in options}
    other = other_defaults(config, origins, [*reader.ignored, *(each.typed for each in merged.values())])
    other += without_a_checkpoint(config, merged)
    other += new_positions(None if offered is None else offered.offer, config.model)
    warned = _not_offered(config_warnings(config, world), merged, offered)
    found = [*warned, *elastic_warnings(config, started, world), *other]
    doubts = tuple(in_flags(_as_given(line, merged)) for line in found)
    return Parsed(config, origins, doubts, tuple(reader.ignored), world)


def read_unjudged(argv: Sequence[str], *, optional: Iterable[str] = ()) -> tuple[Config, dict[str, str]]:
    """Read flags and files for a planner: whether the layout is legal is not asked, since it is still to be chosen.

    Returns the configuration, and the origin of every value that was given. Raises ConfigError for unknown names,
    wrong types and missing fields; required ones among `optional` get a stand-in.
    """
    reader = Reader()
    config, origins, missing = _build(reader, _merge(_read_levels(reader, argv), reader))
    lacking = [name for name in missing if name not in set(optional)]
    found = reader.problems + [_required(reader.options[name], None) for name in lacking]
    if found:
        raise _in_flags(found)
    return config, {name: where for name, where in origins.items() if not where.endswith("family")}


def without_effect(argv: Sequence[str]) -> str | None:
    """The line that names Megatron-LM's flags that flags and files give and that have no effect here; None: there are
    none. Raises ConfigError where a file cannot be read."""
    reader = Reader()
    _read_levels(reader, argv)
    return ignored_line(tuple(reader.ignored))


def ignored_line(ignored: Sequence[str]) -> str | None:
    """The line about `Parsed.ignored`."""
    return f"Megatron-LM flags without effect here (docs/megatron_flags.md): {', '.join(ignored)}" if ignored else None


def _with_offer(
    levels: Sequence[Sequence[GivenOption]], reader: Reader, read_offer: ReadOffer | None
) -> tuple[Offered | None, list[Sequence[GivenOption]]]:
    """Puts what `--load` offers below the other levels, where that is asked for or it is a Hugging Face model."""
    given = {each.name: each for level in levels for each in level}
    value = {name: each.value for name, each in given.items()}
    save, asked = value.get("save"), bool(value.get("use_checkpoint_args"))
    load = value.get("load") or (save if value.get("auto_resume") else None)
    may_be_empty = save is not None and load is not None and os.path.abspath(save) == os.path.abspath(load)
    must_be_there = bool(value.get("exit_on_missing_checkpoint")) and may_be_empty and read_offer is not None
    huggingface = load is not None and os.path.isfile(os.path.join(load, "config.json"))
    if huggingface and value.get("model_module") is not None:
        reader.problems.append(
            f"`load`={load}: a Hugging Face model; the factory of `model_module` loads its weights itself "
            "(from_pretrained), and `load` takes checkpoints of such runs"
        )
        return None, list(levels)
    if load is None or not (asked or huggingface or must_be_there):
        return None, list(levels)
    offer = None
    try:
        if read_offer is None:
            raise ConfigError("`use_checkpoint_args`: no checkpoint is read here; give the model's flags")
        trusted = bool(value.get("trust_pickle"))
        offer = read_offer(load, value.get("ckpt_step"), trusted, value.get("vocab_size"))
        if offer is None and (must_be_there or not may_be_empty):
            needs = "`exit_on_missing_checkpoint`" if must_be_there else "`use_checkpoint_args`"
            if not must_be_there and served_url(load) is None and not os.path.lexists(load):
                raise ConfigError(missing_load(load))  # the words of the check of files, which are said once
            raise ConfigError(f"`load`={load}: no committed checkpoint; {needs} needs one")
    except MegaliteError as error:
        if asked or read_offer is not None:
            reader.problems += error.text.split("\n")
            # What would have come from there is not missing.
            reader.broken |= {name for name, option in reader.options.items() if option.section == "model"}
    if offer is None or not (asked or offer.huggingface):
        return None, list(levels)
    offered = Offered(offer, given, asked)
    below = offered.values()
    above = [[each for each in level if not (each.name in below and is_left_open(each))] for level in levels]
    given = {each.name: each for level in above for each in level}
    return replace(offered, given=given), [list(below.values()), *above]


def _not_offered(lines: Iterable[str], merged: Mapping[str, GivenOption], offered: Offered | None) -> Iterator[str]:
    """Of values that came with the model nobody can drop one."""
    taken = {name for name, each in merged.items() if offered is not None and each.where == offered.offer.where}
    for line in lines:
        name, _, said = line.removeprefix("`").partition("`")
        if name not in taken or ": has no effect" not in said:
            yield line


def _required(option: Option, offered: Offered | None) -> str:
    line = f"{option.marked}: required (as a flag, or as '{option.name}' in a `config` file)"
    if offered is not None and not offered.architecture and option.section == "model":
        return f"{line}; `use_checkpoint_args` takes it from {offered.offer.where}"
    return line


def _read_levels(reader: Reader, argv: Sequence[str]) -> list[Sequence[GivenOption]]:
    """What each file and then the flags give. Raises ConfigError where a file cannot be read."""
    files, flags = reader.read_argv(argv)
    levels: list[Sequence[GivenOption]] = []
    for path in files:
        try:
            levels.append(reader.read_entries(read_yaml(path, reader.problems)))
        except ConfigError as error:
            reader.problems += error.text.split("\n")
    whole = len(levels) == len(files)
    levels.append(flags)
    if not whole:  # what seems to be missing or wrong may be in the file that cannot be read
        _merge(levels, reader)
        raise _in_flags(reader.problems)
    return levels


def _merge(levels: Iterable[Sequence[GivenOption]], reader: Reader) -> dict[str, GivenOption]:
    """Later levels win; inside a level two spellings of one field must agree."""
    merged: dict[str, GivenOption] = {}
    for level in levels:
        here: dict[str, GivenOption] = {}
        for given in level:
            before = here.get(given.name)
            if before is not None and _spelling(before) != _spelling(given) and before.value != given.value:
                reader.problems.append(f"{_typed(given)}: contradicts {_typed(before)}; give one of them")
            here[given.name] = given
        reader.problems += work_out_level(here, merged)
        if "virtual_pipeline_model_parallel_size" in here and "num_layers_per_virtual_pipeline_stage" in here:
            reader.problems.append(
                "`num_layers_per_virtual_pipeline_stage`: excludes `virtual_pipeline_model_parallel_size`; give one"
            )
        if "virtual_pipeline_model_parallel_size" in here:
            merged.pop("num_layers_per_virtual_pipeline_stage", None)
        spoken = [reader.options[name] for name, given in here.items() if name in reader.options and _says_more(given)]
        kind = here["tokenizer_type"].value if "tokenizer_type" in here else None
        for name in [*merged]:
            if kind in WITHOUT_FILE.get(name, ()):  # of the tokenizer that this one replaces
                del merged[name]
            elif name in reader.options and any(each.excludes(reader.options[name]) for each in spoken):
                del merged[name]
        merged |= here
    reader.problems += work_out(merged, reader.broken) + dropped_otherwise(merged, reader.ignored)
    return merged


def _says_more(given: GivenOption) -> bool:
    """Whether a value is more than `not this one` (`--no-bf16`, `train_samples: null`, `data_path: []`)."""
    return given.value is not None and given.value is not False and given.value != ()


def _spelling(given: GivenOption) -> str:
    """The name, or the flag and the argument, that were typed."""
    return given.typed.partition("=")[0]


def _typed(given: GivenOption) -> str:
    """A value as the user gave it: by which flag, or which `NAME=VALUE` of one."""
    name, _, rest = given.typed.partition(" ")
    flag = f"`{name}`"
    if rest:
        return f"{flag} {rest}"
    return flag if name in CONSTANT_FLAGS else as_typed(flag, given.value)


def _as_given(line: str, merged: Mapping[str, GivenOption]) -> str:
    """Name a value that a line speaks of by the spelling that the user gave."""

    def spelling(match: re.Match[str]) -> str:
        given = merged.get(match[1])
        if given is None or given.typed in (given.name, *EXTRA_OPTIONS) or show(given.value) != (match[2] or "true"):
            return match[0]
        return _typed(given)

    return re.sub(r"`([a-z0-9_]+)`(?:=([^\s:;,()]+))?", spelling, line)


def _build(reader: Reader, merged: Mapping[str, GivenOption]) -> tuple[Config, dict[str, str], list[str]]:
    """The configuration, the origin of what was given, and the required fields that were not given; what is missing or
    broken gets a stand-in, so that the rest can still be checked."""
    values = {name: given.value for name, given in merged.items()}
    origins = {name: given.where for name, given in merged.items()}
    family = values.get("model_type", "gpt")
    for name, value in FAMILY_DEFAULTS.get(family, {}).items():
        if name not in values:
            values[name], origins[name] = value, f"{family} family"
    required = {name: placeholder(option) for name, option in reader.options.items() if option.required}
    ours = _sizes_of_ours(reader.options, values)
    missing = [name for name in required if name not in {*values, *reader.broken, *ours}]
    arguments = required | {name: value for name, value in values.items() if name not in reader.broken}
    config = Config(**{section: build_section(cls, arguments) for section, cls in SECTIONS.items()})
    return config, origins, missing


def _sizes_of_ours(options: Mapping[str, Option], values: Mapping[str, object]) -> list[str]:
    """Fields of the model section that a run of `--model-module` does not have."""
    if values.get("model_module") is None:
        return []
    return [name for name, option in options.items() if option.section == "model" and name not in OF_MODULES]


def _elastic(config: Config, started: int, local_size: int, broken: set[str]) -> tuple[Config, int]:
    """How many ranks train; local ones beyond are not started."""
    if config.parallel.restarts.elastic is None or broken:
        return config, started
    ranks = training_ranks(config, started, local_size)
    if config.parallel.nprocs is not None:
        config = replace(config, parallel=replace(config.parallel, nprocs=ranks))
    return config, ranks


def _derive(config: Config, origins: dict[str, str], world_size: int) -> tuple[Config, dict[str, str]]:
    """Fix the global batch size, since a resume with more replicas must not silently enlarge it, and the iterations
    without delay."""
    training = config.training
    if training.global_batch_size is None and training.batch_ramp.step_batch_size_schedule is None:
        size = config.global_batch_size(world_size)
        config = replace(config, training=replace(training, global_batch_size=size))
        origins = {**origins, "global_batch_size": "derived"}
    if "pipeline_flush_steps" not in origins and (steps := flushed_start(config, world_size)):
        config = replace(config, parallel=replace(config.parallel, pipeline_flush_steps=steps))
        origins = {**origins, "pipeline_flush_steps": "derived"}
    return config, origins


def _with_place(line: str, origins: Mapping[str, str]) -> str:
    """Name the file where the value that a line begins with was given."""
    match = re.match(r"`([a-z0-9_]+)`[=:]", line)
    where = origins.get(match[1]) if match else None
    if where is None or where == COMMAND_LINE or where.endswith("family") or where.startswith("default"):
        return line
    return f"{line} [{os.path.basename(where)}]" if os.sep in where else f"{line} [{where}]"


def _in_flags(lines: Iterable[str]) -> ConfigError:
    """All problems, each once, in the words of the command line."""
    return ConfigError(list(dict.fromkeys(map(in_flags, lines))))
