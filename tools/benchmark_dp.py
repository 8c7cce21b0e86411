"""Data parallelism beside its peers: tokens per second and peak memory of one GPT, on CPU (gloo) or GPU (NCCL).

    python tools/benchmark_dp.py --nprocs 2                    # ZeRO stages 0-3, DDP, FSDP2, ZeroRedundancyOptimizer
    python tools/benchmark_dp.py --nprocs 2 --variants zero1 ddp --rounds 9 --json out.jsonl

All variants train the same GPT on the same tokens with fused AdamW, without clipping, weight decay or dropout. They
take turns in the same processes, so that a noisy neighbour disturbs all alike; `ratio` is against `alone`, the same
step without any message. Peak memory is
measured in a second pass, one variant a launch: what a fresh process uses above its imported libraries.
"""

from __future__ import annotations

import argparse
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
    for record in launch(arguments, arguments.variants, memory=False):
        rows[record["variant"]].update(record)
    if arguments.memory:
        for name in arguments.variants:
            for record in launch(arguments, [name], memory=True):
                rows[name].update(record)
    report(arguments, list(rows.values()))
    return 1 if any("error" in row for row in rows.values()) else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2, help="ranks (one thread each on CPU)")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory too")
    parser.add_argument("--float32-matmul-precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--json", type=Path, help="append one line a variant to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def launch(arguments: argparse.Namespace, variants: list[str], *, memory: bool) -> list[dict[str, Any]]:
    """Runs the ranks; the records that rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "env",
            "OMP_NUM_THREADS=1",
            sys.executable,
            __file__,
            "--rendezvous",
            str(Path(folder) / "store"),
            "--variants",
            *variants,
        ]
        for name in ("nprocs", "preset", "micro_batch_size", "rounds", "float32_matmul_precision"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command.append("--memory" if memory else "--no-memory")
        ranks = [
            subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.PIPE if r == 0 else None)
            for r in range(arguments.nprocs)
        ]
        output = ranks[0].communicate()[0].decode()
        for rank in ranks:
            rank.wait()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


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
    )
    from benchmark_dp_variants import build_variant

    build_variant(
        "alone", PRESETS["tiny"], 1, arguments.rank, arguments.nprocs
    )()  # libraries and kernels are loaded now
    base = peak_memory(cuda)
    steps: dict[str, Step] = {}
    cfg = PRESETS[arguments.preset]
    for name in arguments.variants:
        step = build_variant(name, cfg, arguments.micro_batch_size, arguments.rank, arguments.nprocs)
        step()
        steps[name] = step
    if arguments.memory:
        steps[arguments.variants[0]]()
        used = torch.tensor([peak_memory(cuda) - base])
        used = used.cuda() if cuda else used
        dist.all_reduce(used, dist.ReduceOp.MAX)
        records = [{"variant": arguments.variants[0], "peak_mib": round(float(used) / 2**20)}]
    else:
        tokens = arguments.micro_batch_size * cfg["s"] * arguments.nprocs
        records = time_in_turn(steps, arguments.rounds, tokens, cuda)
    if arguments.rank == 0:
        for record in records:
            print(json.dumps(record), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that would abort the interpreter's own way out


def time_in_turn(steps: dict[str, Step], rounds: int, tokens: int, cuda: bool) -> list[dict[str, Any]]:
    """Round-robin; the slowest rank counts. Ratios are paired round by round."""
    import torch
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
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


def report(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    print(f"{arguments.preset}, {arguments.nprocs} ranks x {arguments.micro_batch_size} sequences")
    print(f"{'variant':18s} {'step ms':>9s} {'tokens/s':>10s} {'ratio':>6s} {'peak MiB':>9s}")
    for row in rows:
        cells = [f"{row.get('step_ms', 0):9.1f}", f"{row.get('tokens_per_second', 0):10.0f}"]
        cells += [f"{row.get('ratio', 0):6.3f}", f"{row['peak_mib']:9d}" if "peak_mib" in row else f"{'-':>9s}"]
        print(f"{row['variant']:18s} {' '.join(cells)}")
    if arguments.json:
        with arguments.json.open("a") as file:
            for row in rows:
                settings = {"preset": arguments.preset, "nprocs": arguments.nprocs}
                file.write(json.dumps({**settings, "micro_batch_size": arguments.micro_batch_size, **row}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
