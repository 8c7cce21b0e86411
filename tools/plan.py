"""Time and memory of a layout before it is launched, and the best layout of a cluster.

    python tools/plan.py --config configs/gpt3_175b.yaml --num-devices 1024 --hardware a100-80gb --free all
    python tools/plan.py <flags of pretrain_gpt.py> --num-devices 64 --hardware h100 --write-config plan.yaml

All flags and files of pretrain_gpt.py are understood. What they give of the layout is kept, the rest is searched; a
full layout is simply predicted. No torch is imported, and no device is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import ToolParser, name_ignored, run_tool, say
from megalite.config import (
    USUAL_VOCABULARIES,
    VOCABULARIES,
    Config,
    StageLayout,
    dump_yaml,
    ids_of_files,
    parse,
    read_unjudged,
)
from megalite.errors import ConfigError, flag_of
from megalite.planner import (
    SEARCHED,
    DeviceClass,
    Hardware,
    Roofline,
    SearchResult,
    as_json,
    available,
    block_text,
    closed_form,
    explain_terms,
    layout_of,
    load_cluster,
    load_profile,
    pareto,
    reasons_against,
    search,
    shapes,
    states_text,
    summary,
)
from megalite.progress import ProgressBar
from plan_fit import explain, remedy
from plan_jobs import job_lines
from plan_plot import check, draw
from plan_sweep import OF_HARDWARE, OF_LAYOUT, Point, best_at, check_out, draw_sweep, grid, line_of, write_csv
from plan_unlike import unlike_lines
from what_if import QUESTIONS, refuse_if_nothing_fits, sweep, table

MOST_DEVICES = 1_000_000
#: Sizes that devices are divided by.
SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
)
MARGIN = 0.1
"""Of a GPU's memory: fragmentation and what libraries take beyond what the hardware's file reserves."""
FARTHEST = 1024
"""Another number of devices is proposed if it is no farther away."""


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--num-devices", type=int, required=True, metavar="N", help="ranks of the run")
    p.add_argument(
        "--hardware", default="h100", metavar="NAME|FILE", help=f"{', '.join(available())}, or a YAML file like theirs"
    )
    p.add_argument("--devices-per-node", type=int, metavar="N", help="default: what the hardware file says")
    p.add_argument(
        "--host-memory-gb",
        type=float,
        metavar="G",
        help="memory of each host, 1e9 bytes: --what-if largest-model uses it",
    )
    p.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="measured times (tools/profile_layers.py) instead of the roofline; without a file the switch of the run",
    )
    p.add_argument("--top", type=int, default=10, metavar="K", help="candidates to show (default 10)")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--write-config", metavar="FILE", help="the first candidate as a configuration that runs as it is")
    p.add_argument(
        "--explain",
        action="store_true",
        help="also the first candidate's model, data, domain and expert terms in closed form",
    )
    p.add_argument(
        "--memory-margin",
        type=float,
        metavar="F",
        help="part of a device's memory for tensors that no layout may need, for what is not predicted (default 0.1; "
        "0 on CPUs and with --device-memory-budget-gb); where nothing leaves it, the fullest may",
    )
    p.add_argument("--allow-2bw", action="store_true", help="also schedules with one-step-old gradients")
    p.add_argument(
        "--free", default="", metavar="NAME,...", help="fields to search although a file gives them; `all` of them"
    )
    p.add_argument(
        "--stages-may-differ", action="store_true", help="also pipelines whose stages have meshes of their own"
    )
    p.add_argument("--what-if", choices=sorted(QUESTIONS), help="a question about the cluster instead of a plan")
    p.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=LOW:HIGH:xK",
        help=f"a search at each point instead: {', '.join((*OF_HARDWARE, *OF_LAYOUT))}; may be repeated",
    )
    p.add_argument("--out", default="", metavar="FILE.csv,FILE.svg", help="where the answers of --sweep go")
    p.add_argument(
        "--jobs", metavar="FILE", help="several jobs of known seconds instead, packed beside gang scheduling"
    )
    p.add_argument("--plot", metavar="FILE.svg|png", help="draw the answer of --what-if (needs matplotlib)")
    return p


def resolve(rest: list[str], free: str, num_devices: int) -> tuple[Config, frozenset[str]]:
    """(Configuration with vocabulary and batch known, fields of the layout that were given)."""
    config, origins = read_unjudged(rest, optional=["micro_batch_size"])
    freed = set(SEARCHED) if free == "all" else {name.replace("-", "_") for name in free.split(",") if name}
    unknown = sorted(freed - set(SEARCHED))
    if unknown:
        raise ConfigError(f"--free={unknown[0]}: not searched; names are {', '.join(SEARCHED)}, or all")
    if config.model.recompute_granularity == "auto":  # the search does it
        freed.add("recompute_granularity")
    given = frozenset(name for name in SEARCHED if name in origins) - freed
    config = _forget(config, freed, given)
    if config.model.vocab_size == 0:
        kind = config.data.tokenizer_type or ""
        size, whose = ids_of_files(config.data) or VOCABULARIES.get(kind), ""
        if size is None and kind == "SentencePieceTokenizer":  # of Megatron-LM's scripts; a dry run assumes it, too
            size, whose = USUAL_VOCABULARIES[kind]
            print(f"{size:,} tokens are assumed, {whose} number: --vocab-size gives another", file=sys.stderr)
        if size is None:
            raise ConfigError(
                "--vocab-size: not given, and no tokenizer.json is named (--tokenizer-model) in which its tokens could "
                "be counted; give their number (pretrain_gpt.py --dry-run says it)"
            )
        config = replace(config, model=replace(config.model, vocab_size=size))
    if config.training.global_batch_size is None and num_devices == 1 and "micro_batch_size" in origins:
        config = replace(config, training=replace(config.training, global_batch_size=config.training.micro_batch_size))
    if config.training.global_batch_size is None:
        micro = f"for example {config.training.micro_batch_size * num_devices}" if "micro_batch_size" in origins else ""
        raise ConfigError(
            "--global-batch-size: not given; say how many samples a step takes, which each layout divides among devices"
            + (micro and f" ({micro}: the micro-batch of the file on each of {num_devices} devices)")
        )
    return replace(config, parallel=replace(config.parallel, nprocs=None)), given


def _forget(config: Config, freed: set[str], given: frozenset[str]) -> Config:
    """Without what belongs to a freed field and makes no sense with another value of it."""
    parallel, model = config.parallel, config.model
    if "virtual_pipeline_model_parallel_size" in freed and "pipeline_schedule" not in given:
        parallel = replace(parallel, virtual_pipeline_model_parallel_size=None)
    if "pipeline_model_parallel_size" in freed:
        parallel = replace(parallel, stage_layout=StageLayout())
    if "recompute_granularity" in freed:
        model = replace(model, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
    return replace(config, parallel=parallel, model=model)


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> None:
    args, rest = parser().parse_known_args(argv)
    if args.profile == "":  # in scripts for pretrain_gpt.py it takes no file
        rest.append("--profile")
    _check(args)
    if args.jobs is not None:
        usual, own = parser().get_default, {**vars(args), "jobs": None, "num_devices": None}
        other = [f"--{name.replace('_', '-')}" for name, value in own.items() if value != usual(name)]
        say("\n".join(job_lines(args.jobs, args.num_devices, [*other, *rest])))
        return
    cluster = load_cluster(args.hardware, args.num_devices, devices_per_node=args.devices_per_node)
    if len(cluster) > 1 and (not args.stages_may_differ or args.profile):
        raise ConfigError(
            f"--hardware={args.hardware}: devices of several kinds; use --stages-may-differ, no --profile or --sweep"
        )
    hardware = min((kind for _, kind in cluster), key=lambda kind: kind.matrix_flops["bf16"])  # sets the pace of all
    if args.host_memory_gb is not None:
        hardware = replace(hardware, host_memory_bytes=args.host_memory_gb * 1e9)
    source: Roofline = Roofline(hardware)
    if args.profile:
        source = profile = load_profile(args.profile, hardware)
        hardware = profile.hardware
    config, given = resolve(rest, args.free, args.num_devices)
    if args.profile:
        profile.check(config)
    name_ignored(rest)
    limit = config.parallel.hardware.device_memory_budget_gb
    if limit is not None:
        hardware = replace(hardware, memory_bytes=limit * 1e9 + hardware.reserved_bytes)
    if args.what_if:
        _answer(args, config, hardware, source, given)
        return
    if args.sweep:
        _sweep(args, config, hardware, given)
        return
    margin = args.memory_margin
    if margin is None:
        margin = 0.0 if hardware.on_cpu or limit is not None else MARGIN
    found = _search(args, config, _less(hardware, margin), source, given)
    spared = f", {margin:.0%} of them kept free (--memory-margin)" * bool(margin)
    if margin and not found.predictions:
        found = _search(args, config, hardware, source, given)
        spared = f"; nothing leaves {margin:.0%} of them free (--memory-margin)"
    if not found.predictions:
        why = _why_nothing(found, config, args.num_devices, hardware, source, stale=args.allow_2bw)
        raise ConfigError(_of_a_plan(why, config, args.num_devices, given))
    say(_json(found, args, hardware) if args.json else summary(found, args.num_devices, hardware, args.top, spared))
    kinds = [DeviceClass(number, kind, source if len(cluster) == 1 else Roofline(kind)) for number, kind in cluster]
    if args.stages_may_differ and not args.json:
        say("\n" + "\n".join(unlike_lines(found.predictions[0], kinds, args.allow_2bw)))
    if args.explain and not args.json:
        say(f"\n{explain_terms(found.predictions[0].config, args.num_devices, hardware)}")
        say("\n".join(states_text(found.predictions[0], hardware)))
        say(block_text(found.predictions[0].config, args.num_devices, hardware))
    if args.write_config:
        _write(found.predictions[0].config, args.num_devices, args.write_config)


def _search(
    args: argparse.Namespace, config: Config, hardware: Hardware, source: Roofline, given: frozenset[str]
) -> SearchResult:
    with ProgressBar("planning", "%") as bar:
        return search(
            config, args.num_devices, hardware, source,
            given=given, stale=args.allow_2bw, top=args.top, on_progress=bar,
        )  # fmt: skip


def _less(hardware: Hardware, margin: float) -> Hardware:
    """With a part of the memory for tensors reserved."""
    return replace(hardware, reserved_bytes=hardware.reserved_bytes + margin * hardware.usable_bytes)


def _check(args: argparse.Namespace) -> None:
    """The tool's own flags, before anything is worked out."""
    if args.num_devices < 1 or args.top < 1:
        raise ConfigError(f"--num-devices={args.num_devices} --top={args.top}: both must be 1 or more")
    if args.num_devices > MOST_DEVICES:
        raise ConfigError(f"--num-devices={args.num_devices}: at most {MOST_DEVICES:,} can be planned for")
    if args.plot is not None:
        if args.what_if is None:
            raise ConfigError(f"--plot={args.plot}: draws a sweep; add --what-if {'|'.join(sorted(QUESTIONS))}")
        check(args.plot)
    if args.write_config is not None and not Path(args.write_config).absolute().parent.is_dir():
        raise ConfigError(f"--write-config={args.write_config}: no such folder; make it first")
    if args.memory_margin is not None and not 0 <= args.memory_margin < 1:
        raise ConfigError(f"--memory-margin={args.memory_margin:g}: a part of the memory, from 0 to below 1")
    grid(args.sweep)
    check_out(args.out)
    no = ("what_if", "profile", "stages_may_differ", "json", "write_config", "explain", "memory_margin")
    other = ["--" + name.replace("_", "-") for name in no if getattr(args, name) not in (None, False)]
    if args.sweep and other:
        raise ConfigError(f"{other[0]}: not with --sweep, which has answers of its own; drop one")
    if args.out and not args.sweep:
        raise ConfigError(f"--out={args.out}: for the answers of --sweep; add one")
    if args.host_memory_gb is not None and (args.what_if != "largest-model" or not args.host_memory_gb > 0):
        raise ConfigError(
            f"--host-memory-gb={args.host_memory_gb:g}: the room on each host, above 0, for --what-if largest-model"
        )
    of_one = {"upgrades": "no upgrade", "largest-model": "one width"}.get(args.what_if)
    if of_one and args.profile:
        own = (
            "; for your own machine take a row's sizes, run tools/profile_layers.py with them and the micro-batch, "
            "then tools/plan.py with the same sizes and --profile, without --what-if (its last line is the time)"
        ) * (args.what_if == "largest-model")
        raise ConfigError(
            f"--profile={args.profile}: measured times know {of_one}; leave it out of --what-if {args.what_if}{own}"
        )
    for flag, value in (("--write-config", args.write_config), ("--json", args.json), ("--explain", args.explain)):
        if args.what_if and value:
            raise ConfigError(f"{flag}: belongs to a plan; leave it out of --what-if {args.what_if}")


def _answer(
    args: argparse.Namespace, config: Config, hardware: Hardware, source: Roofline, given: frozenset[str]
) -> None:
    with ProgressBar("planning", "clusters") as bar:
        asked = (args.what_if, config, args.num_devices, hardware, source, given)
        answer = sweep(*asked, stale=args.allow_2bw, on_progress=bar)
    say(f"vocabulary of {config.model.vocab_size:,} tokens (--vocab-size, or the file of --tokenizer-model)")
    say(table(answer))
    if args.plot is not None:
        draw(answer, args.plot)
    refuse_if_nothing_fits(answer)


def _sweep(args: argparse.Namespace, config: Config, hardware: Hardware, given: frozenset[str]) -> None:
    found: list[Point] = []
    with ProgressBar("planning", "clusters") as bar:
        for values in grid(args.sweep):
            bar(len(found), None, ", ".join(f"{name} {value:g}" for name, value in values.items()))
            found.append(best_at(config, args.num_devices, hardware, values, given, args.allow_2bw))
    say("\n".join(map(line_of, found)))
    for file in check_out(args.out):
        (draw_sweep if file.suffix == ".svg" else write_csv)(found, file)


def _json(found: SearchResult, args: argparse.Namespace, hardware: Hardware) -> str:
    shown = found.predictions[: args.top]
    front = pareto(shown)
    best = found.predictions[0].config
    return json.dumps(
        {
            "num_devices": args.num_devices,
            "hardware": hardware.name,
            "layouts_considered": found.considered,
            "candidates": [as_json(prediction, hardware) for prediction in shown],
            "pareto": [number for number, prediction in enumerate(shown) if prediction in front],
            **({"closed_form": closed_form(best, args.num_devices, hardware)._asdict()} if args.explain else {}),
        },
        indent=1,
    )


def _why_nothing(
    found: SearchResult, config: Config, world_size: int, hardware: Hardware, source: Roofline, *, stale: bool
) -> list[str]:
    """Lines about a search that found nothing."""
    if not found.rejected:
        here = reasons_against(config, world_size, layout_of(config))
        return list(found.problems) or here or ["no layout of this cluster is legal"]
    misfit = found.rejected[0]
    change = remedy(misfit, world_size, hardware, source, stale=stale)
    advice = f"smallest change that fits: {change}" if change else "nor does it on 64 times as many devices"
    return [f"{explain(misfit, world_size, hardware)}; {advice}"]


def _of_a_plan(lines: list[str], config: Config, devices: int, given: frozenset[str]) -> list[str]:
    """The same in the words of a plan, which divides so many devices, where they cannot be divided; a run has a world
    size."""
    if next(shapes(config, devices, given), None) is not None:
        return lines
    near = [
        next((count for count in counts if next(shapes(config, count, given), None) is not None), None)
        for counts in (range(devices - 1, max(0, devices - FARTHEST), -1), range(devices + 1, devices + FARTHEST))
    ]
    left = [line for line in lines if not line.startswith("world size") and "data-parallel size" not in line]
    found = " or ".join(str(count) for count in near if count is not None)
    if left and not found:
        return left  # no number of devices would help
    layout, batch = layout_of(config), config.training.global_batch_size
    flags = ", ".join(f"{flag_of(name)}={getattr(layout, name)}" for name in SIZES if name in given)
    kept = f"{flags} (of the files and flags)" if flags else "sizes that divide the model's heads"
    why = f"no layout of {devices} devices has {kept} and replicas that divide --global-batch-size={batch}"
    advice = [f"plan for {found} devices" if found else "plan for a number with more divisors"]
    advice += ["--free all searches other sizes too"] * bool(flags)
    return [f"--num-devices={devices}: {why}; {', or '.join(advice)}"]


def _write(config: Config, world_size: int, path: str) -> None:
    """A configuration that `pretrain_gpt.py --config` takes as it is: what is no default, where that says it all."""
    config = replace(config, parallel=replace(config.parallel, nprocs=world_size))
    Path(path).write_text(dump_yaml(config, every=False))
    try:
        if parse(["--config", path], check_files=False, world_size=world_size) != config:
            Path(path).write_text(dump_yaml(config))
            parse(["--config", path], check_files=False, world_size=world_size)
    except ConfigError as error:
        print(f"{path}: written; before it runs: {str(error).replace(chr(10), '; ')}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
