"""Data parallelism beside its peers: tokens per second and peak memory of one GPT, on CPU (gloo) or GPU (NCCL).

    python tools/benchmark_dp.py --nprocs 2                    # ZeRO stages 0-3, DDP, FSDP2, ZeroRedundancyOptimizer
    python tools/benchmark_dp.py --nprocs 2 --variants zero1 ddp --rounds 9 --json out.jsonl

All variants train the same GPT on the same tokens with fused AdamW, without clipping, weight decay or dropout. They
take turns in the same processes, so that a noisy neighbour disturbs all alike; `ratio` is against `alone`, the same
step without any message. Peak memory is measured in a second pass, one variant a launch: what a fresh process uses
above its imported libraries. A variant that fails or hangs becomes a row with its error; the others go on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRESETS = {
    "tiny": {"L": 2, "h": 64, "heads": 2, "s": 32, "V": 256},
    "small": {"L": 6, "h": 384, "heads": 6, "s": 256, "V": 8192},
    "medium": {"L": 8, "h": 512, "heads": 8, "s": 512, "V": 8192},
    "gpt2": {"L": 12, "h": 768, "heads": 12, "s": 1024, "V": 50304},
}
VARIANTS = ["alone", "zero0", "zero1", "zero2", "zero3", "ddp", "zero-redundancy", "fsdp2"]
Step = Callable[[], Any]


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.rank is not None:
        return run_rank(arguments)
    rows: dict[str, dict[str, Any]] = {name: {"variant": name} for name in arguments.variants}
    time_variants(arguments, rows)
    if arguments.memory:
        report(arguments, list(rows.values()), final=False)
        for name in arguments.variants:
            print(f"memory of {name} ...", file=sys.stderr, flush=True)
            records, _, error = launch(arguments, [name], memory=True)
            for record in records:
                rows[name].update(record)
            if error is not None:
                rows[name].setdefault("error", error)
    report(arguments, list(rows.values()), final=True)
    return 1 if any("error" in row for row in rows.values()) else 0


def time_variants(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    """All variants in turn in one launch; again without the one that brought it down, as long as one does."""
    names = list(arguments.variants)
    while names:
        print(f"time of {', '.join(names)} ...", file=sys.stderr, flush=True)
        records, at, error = launch(arguments, names, memory=False)
        for record in records:
            rows[record["variant"]].update(record)
        if error is None:
            return
        if at is None:  # nothing was begun: no variant is to blame
            for name in names:
                rows[name]["error"] = error
            return
        rows[at]["error"] = error
        names.remove(at)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2, help="ranks (one thread each on CPU)")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory too")
    parser.add_argument("--float32-matmul-precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for one launch (plus 30 for each variant that it times)"
    )
    parser.add_argument("--json", type=Path, help="append one line a variant to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def launch(
    arguments: argparse.Namespace, variants: list[str], *, memory: bool
) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Runs the ranks; what rank 0 measured, the variant that was under way last, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, __file__]
        command += ["--rendezvous", str(Path(folder) / "store"), "--variants", *variants]
        for name in ("nprocs", "preset", "micro_batch_size", "rounds", "float32_matmul_precision", "timeout"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command.append("--memory" if memory else "--no-memory")
        outputs = [Path(folder) / f"output_{rank}" for rank in range(arguments.nprocs)]
        errors = [Path(folder) / f"errors_{rank}" for rank in range(arguments.nprocs)]
        ranks = []
        for rank, (output, error) in enumerate(zip(outputs, errors, strict=True)):
            with output.open("wb") as out, error.open("wb") as err:
                ranks.append(subprocess.Popen([*command, "--rank", str(rank)], stdout=out, stderr=err))
        problem = watch(ranks, arguments.timeout + 30 * len(variants) * (not memory), errors)
        lines = outputs[0].read_text(errors="replace").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    begun = [record["begun"] for record in records if "begun" in record]
    return [record for record in records if "variant" in record], begun[-1] if begun else None, problem


def watch(ranks: list[subprocess.Popen[bytes]], seconds: float, errors: list[Path]) -> str | None:
    """Waits until all ranks have ended, and ends the others when one fails or time is up; says what went wrong."""
    deadline = time.monotonic() + seconds
    problem = None
    while problem is None and any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed:
            time.sleep(1.0)  # the others may know the reason better
            said = [
                line for path in errors for line in path.read_text(errors="replace").splitlines() if "Error" in line
            ]
            problem = said[0].strip()[:200] if said else f"rank {failed[0]} ended with status {ranks[failed[0]].poll()}"
        elif time.monotonic() > deadline:
            problem = f"no end after {seconds:.0f} s (--timeout)"
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    if problem is None and any(rank.returncode for rank in ranks):
        problem = f"ended with status {max(rank.returncode for rank in ranks)}"
    return problem


def run_rank(arguments: argparse.Namespace) -> int:
    """One rank: builds the variants, times them in turn (or measures the memory of the one it was given)."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(arguments.rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=arguments.rank,
        world_size=arguments.nprocs,
        timeout=datetime.timedelta(seconds=arguments.timeout),
    )
    from benchmark_dp_variants import build_variant

    build_variant("alone", PRESETS["tiny"], 1, arguments.rank, arguments.nprocs)()  # loads libraries and kernels
    base = peak_memory(cuda)
    steps, records = build_variants(arguments, cuda)
    if arguments.memory and steps:
        steps[arguments.variants[0]]()
        used = torch.tensor([peak_memory(cuda) - base])
        used = used.cuda() if cuda else used
        dist.all_reduce(used, dist.ReduceOp.MAX)
        records.append({"variant": arguments.variants[0], "peak_mib": round(float(used) / 2**20)})
    elif steps:
        tokens = arguments.micro_batch_size * PRESETS[arguments.preset]["s"] * arguments.nprocs
        records += time_in_turn(steps, arguments, tokens, cuda)
    if arguments.rank == 0:
        for record in records:
            print(json.dumps(record), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that would abort the interpreter's own way out


def build_variants(arguments: argparse.Namespace, cuda: bool) -> tuple[dict[str, Step], list[dict[str, Any]]]:
    """The variants that make a first step on all ranks, and a record with the error of each other."""
    from benchmark_dp_variants import build_variant

    steps: dict[str, Step] = {}
    failures: list[dict[str, Any]] = []
    for name in arguments.variants:
        tell_begun(arguments, name)
        error = ""
        try:
            sequences, ranks = arguments.micro_batch_size, arguments.nprocs
            step = build_variant(name, PRESETS[arguments.preset], sequences, arguments.rank, ranks)
            step()
            steps[name] = step
        except Exception as problem:  # the ranks agree below; one that waits for the others is ended by the launcher
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        if failed_anywhere(bool(error), cuda):
            steps.pop(name, None)
            failures.append({"variant": name, "error": error or "failed on another rank"})
    return steps, failures


def tell_begun(arguments: argparse.Namespace, name: str) -> None:
    """So that the launcher knows which variant to blame if nothing comes after."""
    if arguments.rank == 0:
        print(json.dumps({"begun": name}), flush=True)


def failed_anywhere(failed: bool, cuda: bool) -> bool:
    """Whether any rank says so."""
    import torch
    import torch.distributed as dist

    box = torch.tensor([float(failed)], device="cuda" if cuda else "cpu")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return bool(box.item())


def time_in_turn(
    steps: dict[str, Step], arguments: argparse.Namespace, tokens: int, cuda: bool
) -> list[dict[str, Any]]:
    """Round-robin; the slowest rank counts. Ratios are paired round by round."""
    import torch
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            tell_begun(arguments, name)
            dist.barrier()
            began = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            took = torch.tensor([time.perf_counter() - began], device="cuda" if cuda else "cpu")
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    records = []
    for name, taken in seconds.items():
        record = {"variant": name, "step_ms": 1e3 * statistics.median(taken)}
        record["tokens_per_second"] = tokens / statistics.median(taken)
        if "alone" in seconds:
            record["ratio"] = statistics.median(a / b for a, b in zip(seconds["alone"], taken, strict=True))
        records.append(record)
    return records


def peak_memory(cuda: bool) -> int:
    """Bytes: device peak on a GPU, resident peak of the process elsewhere."""
    if cuda:
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(arguments: argparse.Namespace, rows: list[dict[str, Any]], *, final: bool) -> None:
    """The table; the times alone, on standard error, before memory has been measured."""
    to = sys.stdout if final else sys.stderr
    print(f"{arguments.preset}, {arguments.nprocs} ranks x {arguments.micro_batch_size} sequences", file=to)
    print(f"{'variant':18s} {'step ms':>9s} {'tokens/s':>10s} {'ratio':>6s} {'peak MiB':>9s}", file=to)
    for row in rows:
        cells = [
            f"{row[key]:{form}}" if key in row else f"{'-':>{width}s}"
            for key, form, width in (
                ("step_ms", "9.1f", 9),
                ("tokens_per_second", "10.0f", 10),
                ("ratio", "6.3f", 6),
                ("peak_mib", "9d", 9),
            )
        ]
        print(f"{row['variant']:18s} {' '.join(cells)}" + (f"  {row['error']}" if "error" in row else ""), file=to)
    if arguments.json and final:
        with arguments.json.open("a") as file:
            for row in rows:
                settings = {"preset": arguments.preset, "nprocs": arguments.nprocs}
                file.write(json.dumps({**settings, "micro_batch_size": arguments.micro_batch_size, **row}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
