"""What a run that begins with a checkpoint says of it: what came from there, what from the flags, what has changed.

resumed from  runs/a/iter_0000100 (saved by 2 ranks)
checkpoint    iteration 100, 800 samples consumed, weights, optimizer state, seed 1234
flags         schedules of learning rate and weight decay (--override-opt-param-scheduler)
changed       layout: pp2, schedule 1f1b -> tp2, ZeRO stage 1; --lr 0.001 -> 0.0005
"""

from collections.abc import Mapping
from typing import Any

from megalite.config import SECTIONS, Config, effective, flat, options_of, show
from megalite.errors import flag_of
from megalite.observe import Record
from megalite.planner import describe_layout
from megalite.train.matmul_precision import MatmulChoice
from megalite.train.param_schedules import ResolvedSchedules
from megalite.train.starting_point import StartingPoint

# Where a run reads and writes, what it tells on the way and when it pauses is no change of the run.
SILENT_SECTIONS = ("checkpoint", "logging")
SILENT = frozenset(
    {
        "data_cache_path",
        "num_workers",
        "nprocs",
        "distributed_backend",
        "distributed_timeout_minutes",
        "exit_interval",
        "exit_duration_in_mins",
        "exit_signal_handler",
        "skip_train",
    }
)
# One entry, as text, says all of these.
LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_schedule",
    "pipeline_schedule_file",
    "sequence_parallel",
    "zero_stage",
    "staleness_correction",
    "staleness_lookahead",
)


def resume_report(
    start: StartingPoint,
    settled: ResolvedSchedules,
    size: int,
    loaded: list[str],
    matmul: MatmulChoice,
    data: list[str],
) -> tuple[list[tuple[str, str]], Record]:
    """(Name and text of each line, what the start line of metrics.jsonl carries of it) for a run that begins with
    `start`.

    settled: the configuration as the run continues. size: of its world. loaded: what the tensors and scalars gave.
    matmul: how fp32 products are computed. data: how they have changed, what a longer training adds to their order.
    """
    config = settled.config
    own_tokenizer = config.data.tokenizer_model == str(start.path)
    kept = ["architecture"] if config.checkpoint.use_checkpoint_args else []
    kept += ["tokenizer"] if own_tokenizer else []
    kept += [f"products of fp32 in mode '{matmul.mode}', as measured then"] if matmul.kept else []
    head = ("resumed from", f"{start.path} (saved by {start.world_size} rank{'s' * (start.world_size > 1)})")
    if start.source is not None:
        head = ("begins with" if start.weights_only else "continues", f"{start.path} ({start.kind})")
    elif start.weights_only:
        head = ("begins with", str(start.path))
    anew = []
    if start.weights_only:
        anew = ["iteration 0, data order, optimizer state and seed are new"]
    elif not config.checkpoint.load_optim:
        anew = ["optimizer state is new (`no_load_optim`)"]
    by_schedule = f"schedules of learning rate and weight decay: {settled.origin}"
    if settled.origin.startswith("checkpoint"):
        kept.append(by_schedule.replace(": checkpoint", ""))
        from_flags = anew
    else:
        from_flags = [*anew, by_schedule.replace(": flags", "")]
    found: dict[str, tuple[str, str]] = {}
    if start.saved is not None:
        found |= changes(start.saved, start.world_size, config, size, told=start.told)
        if start.told is not None:  # its schedules are known, and not the flags that gave them
            found = {**settled.other, **found}
    if own_tokenizer:
        tokenizer = [flag_of("tokenizer_type"), flag_of("tokenizer_model")]
        found = {name: pair for name, pair in found.items() if name not in tokenizer}
    rows = [head, ("checkpoint", ", ".join([*loaded, *kept]))]
    rows += [("flags", ", ".join(from_flags))] if from_flags else []
    rows += [("data", "; ".join(data))] if data else []
    if start.saved is not None:
        rows.append(("changed", "; ".join(f"{name} {old} -> {new}" for name, (old, new) in found.items()) or "nothing"))
    return rows, {"loaded_path": str(start.path), "changed": {name: list(pair) for name, pair in found.items()}}


def changes(
    before: Config, size_before: int, now: Config, size: int, *, told: frozenset[str] | None = None
) -> Mapping[str, tuple[str, str]]:
    """Name (a flag, or `layout:`) -> (then, now), as texts; where a run reads and writes is left out. told: the
    settings that are known of the run before; None: all."""
    found: dict[str, tuple[str, str]] = {}
    layouts = describe_layout(before, size_before), describe_layout(now, size)
    if layouts[0] != layouts[1] and told is None:
        found["layout:"] = layouts
    for section, cls in SECTIONS.items():
        if section in SILENT_SECTIONS:
            continue
        then, here = _values(before, section), _values(now, section)
        shown = [
            o for o in options_of(section, cls) if o.name not in SILENT.union(LAYOUT) and o.facts.get("saved", True)
        ]
        shown = [option for option in shown if told is None or option.name in told]
        other = [option for option in shown if then[option.name] != here[option.name]]
        for option in other:
            old, new = then[option.name], here[option.name]
            rivals = [rival for rival in other if option.excludes(rival)]
            if not rivals:
                found[option.flag] = (_text(old), _text(new))
            elif old != option.default:  # another spelling took its place
                typed = [
                    rival.flag if here[rival.name] is True else f"{rival.flag} {_text(here[rival.name])}"
                    for rival in rivals
                ]
                found[option.flag] = (_text(old), " ".join(typed))
    return found


def _values(config: Config, section: str) -> Mapping[str, Any]:
    """Field name -> value; of the model what it amounts to, so that a default said aloud is no change."""
    plain = flat(getattr(config, section))
    return {**plain, **effective(config.model)} if section == "model" else plain


def _text(value: Any) -> str:
    return "none" if value in (None, ()) else show(value)
