"""Draw, price and prove a pipeline schedule on a laptop.

    python tools/show_schedule.py --schedule 2bw --pipeline-model-parallel-size 4 --num-microbatches 8
    python tools/show_schedule.py --schedule zb-v --pipeline-model-parallel-size 4 --num-microbatches 8
    --output zbv.svg
    python tools/show_schedule.py --schedule 1f1b --num-microbatches 8 --format file --output mine.txt
    python tools/show_schedule.py --schedule decode --num-microbatches 4      # generation: rounds of four groups
    python tools/show_schedule.py --compare gpipe,1f1b,2bw --pipeline-model-parallel-size 4
    --num-microbatches 8

Costs are the times of one micro-batch through all layers of one rank; a rank's v chunks take 1/v of it each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import ToolParser, check_file, check_numbers
from megalite.errors import ConfigError, MegaliteError, ScheduleError, flag_of, spelled
from megalite.schedule import (
    SCHEDULES,
    ActivationRoom,
    Costs,
    Program,
    StagePlacement,
    Timeline,
    WeightChunks,
    build_program,
    chunk_traffic,
    dump_program,
    find_schedule,
    forward_program,
    insert_transfers,
    load_program,
    merge_backward,
    render_html,
    render_svg,
    render_text,
    render_trace,
    residency,
    schedule_warnings,
    simulate,
    validate,
    with_chunks,
)
from megalite.streams import escape_unsayable
from schedule_figures import comparison, figures, summary

ASYNCHRONOUS_BATCHES = 4
"""Batches drawn when a schedule does not drain after each: enough to see the steady state."""
MOST_CELLS = 2**14
MOST_BYTES = 1 << 26
"""Of a schedule's file."""
FORMAT_OF = {"": "text", ".txt": "text", ".svg": "svg", ".html": "html", ".json": "json"}
"""Ending of `--output` -> its format; a trace is JSON, too, and a schedule's file text."""
DECODE = "decode"
"""Generation's program: `--num-microbatches` groups of sequences, `--num-batches` rounds of one token."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = ToolParser("Draw, price and prove a pipeline schedule.")
    p.formatter_class = argparse.HelpFormatter  # the defaults are named below
    what = p.add_mutually_exclusive_group(required=True)
    names = ("--schedule", "--pipeline-schedule")
    what.add_argument(*names, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}; or {DECODE}: generation")
    what.add_argument("--pipeline-schedule-file", metavar="FILE", help="a schedule of your own as text")
    what.add_argument("--compare", metavar="A,B,...", help="a table of several schedules, or `all`")
    p.add_argument("--pipeline-model-parallel-size", type=int, metavar="P", help="ranks (default 4)")
    p.add_argument("--num-microbatches", type=int, metavar="M", help="per batch (default 8)")
    p.add_argument("--virtual-pipeline-model-parallel-size", type=int, metavar="V", help="chunks per rank")
    p.add_argument("--chimera-pairs", type=int, metavar="F", help="pairs of opposite pipelines (chimera; default 1)")
    p.add_argument(
        "--num-batches",
        type=int,
        metavar="T",
        help="default 1; 4 for asynchronous schedules and rounds of decode, 8 to compare schedules",
    )
    for name in ("forward", "backward-input", "backward-weight"):
        p.add_argument(f"--cost-{name}", type=_cost, default=Fraction(1), metavar="TIME", help="default 1")
    p.add_argument(
        "--activation-capacity",
        type=_cost,
        metavar="N",
        help="micro-batches whose activations a rank may hold; the others wait on the host (EVICT, PREFETCH)",
    )
    p.add_argument(
        "--weight-capacity",
        type=int,
        metavar="N",
        help="layers of --layers-per-stage whose weights have room on a rank; the others come from the host (FETCH)",
    )
    p.add_argument("--layers-per-stage", type=int, metavar="L", help="of --weight-capacity, default 4")
    p.add_argument("--cost-transfer", type=_cost, default=Fraction(0), metavar="TIME", help="to or from it, default 0")
    p.add_argument("--cost-communication", type=_cost, default=Fraction(0), metavar="TIME", help="one hop, default 0")
    p.add_argument(
        "--format",
        choices=("text", "json", "svg", "html", "trace", "file"),
        help="default: what the name of --output ends in, else text",
    )
    p.add_argument("--output", type=Path, metavar="FILE.svg|html|json|txt", help="default: standard output")
    return p


def _cost(text: str) -> Fraction:
    """Decimals stay exact, so that equal times compare equal."""
    value = Fraction(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: a time cannot be negative")
    return value


def _format(wanted: str | None, output: Path | None) -> str:
    """What is written. Raises ConfigError for a file whose name promises something else."""
    ending = "" if output is None else output.suffix.lower()
    named = FORMAT_OF.get(ending)
    if wanted is None and named is None:
        raise ConfigError(
            f"--output={output}: {ending} is not a format of this tool; end it in .svg, .html, .json or .txt"
        )
    if wanted not in (None, named) and named in ("svg", "html"):
        raise ConfigError(f"--output={output}: --format={wanted} writes no {ending}; use --format={named}, or drop it")
    return wanted or named or "text"


def _costs(args: argparse.Namespace) -> Costs:
    return Costs(
        args.cost_forward,
        args.cost_backward_input,
        args.cost_backward_weight,
        args.cost_communication,
        args.cost_transfer,
        host_byte=args.cost_transfer,
    )


def _moving(program: Program, args: argparse.Namespace) -> Program:
    """With EVICT and PREFETCH, if the ranks have a capacity."""
    if args.activation_capacity is None:
        return program
    if program.rounds is not None:
        raise ConfigError(f"--activation-capacity: {program.name} keeps no activations; leave it out")
    one, chunks = (1.0,) * program.num_stages, float(args.activation_capacity / program.activation_unit)
    room = ActivationRoom(one, one, (chunks,) * program.num_ranks)
    return insert_transfers(merge_backward(program), room)


def _hosting(program: Program, args: argparse.Namespace) -> Program:
    """With weights that come from the host layer by layer, if the ranks have room for some."""
    if args.weight_capacity is None:
        if args.layers_per_stage is not None:
            raise ConfigError(f"--layers-per-stage={args.layers_per_stage}: needs --weight-capacity")
        return program
    number_of_layers = 4 if args.layers_per_stage is None else args.layers_per_stage
    if program.rounds is not None:
        raise ConfigError(f"--weight-capacity: {program.name} keeps its weights; leave it out")
    for flag, number in (("weight-capacity", args.weight_capacity), ("layers-per-stage", number_of_layers)):
        if number < 1:
            raise ConfigError(f"--{flag}={number}: at least 1")
        if number > MOST_CELLS:
            raise ConfigError(f"--{flag}={number}: at most {MOST_CELLS}")
    if program.asynchronous:
        raise ConfigError(f"--weight-capacity: {program.name} keeps two versions of its weights; use --schedule=1f1b")
    layers, stages = tuple((layer,) for layer in range(number_of_layers)), program.num_stages
    sizes, nothing, room = ((1,) * len(layers),) * stages, ((0, 0),) * stages, (args.weight_capacity,)
    chunks = WeightChunks(sizes, (layers,) * stages, (layers[::-1],) * stages, nothing, room * program.num_ranks)
    return with_chunks(merge_backward(program), chunks)


def _program(name: str, args: argparse.Namespace) -> Program:
    # Schedules that have no choice of chunks ignore the flag in a comparison, where it is meant for the others.
    ranks, microbatches = args.pipeline_model_parallel_size, args.num_microbatches
    if ranks * microbatches > MOST_CELLS:
        raise ConfigError(
            f"--num-microbatches={microbatches}: on {ranks:,} ranks these are {ranks * microbatches:,} forwards, at "
            f"most {MOST_CELLS:,} can be shown; show fewer, a schedule repeats itself"
        )
    chunks = args.virtual_pipeline_model_parallel_size
    if name == DECODE:
        if min(ranks, microbatches) < 1 or chunks is not None:
            raise ConfigError(
                f"--schedule={name}: takes --pipeline-model-parallel-size and --num-microbatches of at least 1, and no "
                "chunks of ranks; change or drop them"
            )
        placement = StagePlacement(ranks, (tuple(range(ranks)),))
        return forward_program(placement, microbatches, rounds=max(1, args.num_batches or ASYNCHRONOUS_BATCHES))
    if args.compare and find_schedule(name).num_chunks is not None:
        chunks = None
    pairs = 1 if args.compare and not find_schedule(name).paired else args.chimera_pairs
    return build_program(name, args.pipeline_model_parallel_size, args.num_microbatches, chunks, num_pairs=pairs)


def _program_of_file(args: argparse.Namespace) -> Program:
    """The schedule of a file. Raises ConfigError for flags that say something else than the file."""
    program = load_program(args.pipeline_schedule_file)
    shape = {
        "pipeline_model_parallel_size": (program.num_ranks, "ranks"),
        "num_microbatches": (program.num_microbatches, "micro-batches per batch"),
        "virtual_pipeline_model_parallel_size": (program.num_stages // program.num_ranks, "chunks per rank"),
    }
    problems = [
        f"{flag_of(name)}={given}: {args.pipeline_schedule_file} is written for {number} {what}; drop the flag"
        for name, (number, what) in shape.items()
        if (given := getattr(args, name)) not in (None, number)
    ]
    if args.chimera_pairs is not None:
        what = f"{args.pipeline_schedule_file} says which rank computes what"
        problems.append(f"--chimera-pairs={args.chimera_pairs}: {what}; drop the flag")
    if problems:
        raise ConfigError(problems)
    return program


def _show(args: argparse.Namespace) -> str:
    """The output for one schedule."""
    program = _program_of_file(args) if args.schedule is None else _program(args.schedule, args)
    program = _hosting(_moving(program, args), args)
    report = validate(program)
    if args.format == "file":  # to be changed, and run with --pipeline-schedule-file
        if program.rounds:
            raise ConfigError(f"--format=file: {program.name} trains nothing; use text, svg, html, json or trace")
        return dump_program(program)
    batches = 1 if program.rounds else args.num_batches or (ASYNCHRONOUS_BATCHES if program.asynchronous else 1)
    timeline = simulate(program, _costs(args), batches=batches, global_norm=True)
    if args.format == "json":
        return json.dumps(figures(program, timeline), indent=2) + "\n"
    if args.format == "trace":
        return render_trace([timeline]) + "\n"
    known = SCHEDULES.get(program.name)
    title = program.name if known is None else known.title
    if program.rounds is not None:
        title = f"Generation: {program.rounds.groups} groups, {program.rounds.number} rounds of one token"
    if args.format == "svg":
        return render_svg(timeline, title=title)
    if args.format == "html":
        return render_html([timeline], heading=title)
    facts = summary(figures(program, timeline)).split("\n")
    order = "the order of the micro-batches" if report.in_order else "an order of its own"
    return (
        "\n".join(
            [
                title if known is None else f"{title} ({known.paper})",
                "",
                render_text(timeline, line_width=shutil.get_terminal_size((160, 24)).columns),
                "",
                "\n".join(facts[: 4 if program.rounds else None]),
                *_held(program),
                *([] if program.rounds else [f"gradient sums   in {order}"]),
            ]
        )
        + "\n"
    )


def _held(program: Program) -> list[str]:
    """What lies where, if the ranks have a capacity."""
    lines = []
    if program.chunks is not None:
        moves = [chunk_traffic(program, rank, program.num_microbatches) for rank in range(program.num_ranks)]
        numbers = " ".join(f"{each.transfers}/{each.uses}" for each in moves)
        lines = [f"weights         layers that come, of the uses of a batch: {numbers}"]
    if program.room is None:
        return lines
    ranks = [residency(actions, program.recomputed, program.room) for actions in program.unroll(1)]
    unit = float(program.activation_unit)
    device, host = (" ".join(f"{unit * row[i]:g}" for row in ranks) for i in (0, 1))
    transfers = " ".join(str(row.transfers) for row in ranks)
    return [*lines, f"on the device   {device} of them at most, on the host {host}; transfers a batch {transfers}"]


def _compare(args: argparse.Namespace) -> str:
    """The table, or its JSON rows, or the pictures of all schedules on one page."""
    if args.activation_capacity is not None:
        raise ConfigError("--activation-capacity: shows one schedule; give it with --schedule, not with --compare")
    names = list(SCHEDULES) if args.compare == "all" else [name.strip() for name in args.compare.split(",")]
    schedules = [find_schedule(name) for name in names]
    batches = args.num_batches or (2 * ASYNCHRONOUS_BATCHES if any(s.asynchronous for s in schedules) else 1)
    rows: list[dict[str, Any] | tuple[str, str]] = []
    timelines: list[Timeline] = []
    for schedule in schedules:
        try:
            program = _program(schedule.name, args)
        except ScheduleError as error:
            rows.append((schedule.name, _own_flags(error.text)))
            continue
        timelines.append(simulate(program, _costs(args), batches=batches, global_norm=True))
        rows.append(figures(program, timelines[-1]))
    if args.format == "json":
        refused = [{"schedule": row[0], "refused": row[1]} for row in rows if isinstance(row, tuple)]
        return json.dumps([row for row in rows if isinstance(row, dict)] + refused, indent=2) + "\n"
    if args.format == "html":
        return render_html(timelines)
    if args.format == "trace":
        return render_trace(timelines) + "\n"
    if args.format in ("svg", "file"):
        raise ScheduleError(
            f"--format={args.format}: one file holds one schedule; use --format html for several, or --schedule"
        )
    shape = f"p = {args.pipeline_model_parallel_size}, m = {args.num_microbatches}, {batches} batches"
    if batches > 1 and any(schedule.asynchronous for schedule in schedules):
        shape += " (a schedule without a flush fills the pipeline once in all of them, --num-batches)"
    head = f"{shape}; an update waits for the gradient norm of all ranks (exact clipping)\n"
    return head + comparison(rows) + "\n"


def _own_flags(text: str) -> str:
    """A line about a training's flags in the words of this tool."""
    own = {
        "pipeline_schedule": "schedule",
        "global_batch_size": "num_microbatches",
        "device_memory_budget_gb": "activation_capacity",
    }
    return spelled(text, lambda name: flag_of(own.get(name, name)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write what is asked for; 2 and one line per problem on standard error if it is illegal."""
    escape_unsayable()
    try:
        args = parser().parse_args(argv)
        check_numbers(
            args,
            num_batches=(1, MOST_CELLS),
            virtual_pipeline_model_parallel_size=(1, MOST_CELLS),
            chimera_pairs=(1, MOST_CELLS),
        )
        for name, value in {"pipeline_model_parallel_size": 4, "num_microbatches": 8, "chimera_pairs": 1}.items():
            if getattr(args, name) is None and args.pipeline_schedule_file is None:
                setattr(args, name, value)
        check_file("--pipeline-schedule-file", args.pipeline_schedule_file, MOST_BYTES)
        args.format = _format(args.format, args.output)
        text = _compare(args) if args.compare else _show(args)
        if args.schedule and args.schedule != DECODE:
            for line in schedule_warnings(
                args.schedule,
                args.pipeline_model_parallel_size,
                args.num_microbatches,
                args.virtual_pipeline_model_parallel_size,
                num_pairs=args.chimera_pairs,
            ):
                print(f"warning: {_own_flags(line)}", file=sys.stderr)
        _write(text, args.output)
    except MegaliteError as error:
        for line in _own_flags(error.text).split("\n"):
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    return 0


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output={output}: cannot be written ({error.strerror}); choose another") from error
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
