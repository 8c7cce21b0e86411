"""Pipeline schedules beside their peers: the time of one step of a GPT over p ranks, in one run.

    python tools/benchmark_pipeline.py                                       # 2 processes; m = 2, 4 and 8
    python tools/benchmark_pipeline.py --nprocs 4 --num-microbatches 8 --variants 2bw 1f1b torch-1f1b

All variants train the same GPT on the same batch, cut into equal stages, with fused AdamW and without clipping. They
take turns in the same processes, so that a noisy neighbour disturbs all alike. `ideal` is the whole model on every
rank at once, without a message, divided by the number of ranks: what a pipeline without bubbles and messages would
need. Peers (`torch-...`) are the schedules of torch.distributed.pipelining over plain PyTorch layers. An asynchronous
schedule runs several batches a sample, without draining between them, and is divided by their number.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRESETS = {
    "tiny": {"L": 4, "h": 64, "heads": 2, "s": 32, "V": 256},
    "small": {"L": 8, "h": 384, "heads": 6, "s": 256, "V": 1024},  # a small head: two halves cost the same
    "medium": {"L": 16, "h": 1024, "heads": 16, "s": 1024, "V": 8192},
}
OURS = ["2bw", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]
PEERS = ["torch-1f1b", "torch-gpipe", "torch-interleaved", "torch-zb-v"]
BATCHES_A_SAMPLE = 6
Step = Callable[[], Any]


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.rank is not None:
        return run_rank(arguments)
    failed = False
    for number in arguments.num_microbatches:
        records, error = launch(arguments, number)
        report(arguments, number, records, error)
        failed = failed or error is not None
    return int(failed)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2, help="pipeline ranks (one thread each on CPU)")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[2, 4, 8], help="one launch for each")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=OURS + PEERS, default=OURS + PEERS)
    parser.add_argument("--float32-matmul-precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one launch")
    parser.add_argument("--json", type=Path, help="append one line a variant to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for number in arguments.num_microbatches:
        if number < 1 or arguments.global_batch_size % number:
            parser.error(
                f"--num-microbatches={number}: does not divide --global-batch-size={arguments.global_batch_size}; "
                "choose a divisor"
            )
    return arguments


def launch(arguments: argparse.Namespace, number: int) -> tuple[list[dict[str, Any]], str | None]:
    """Runs the ranks; what rank 0 measured, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, __file__]
        command += ["--rendezvous", str(Path(folder) / "store"), "--variants", *arguments.variants]
        for name in ("nprocs", "preset", "global_batch_size", "rounds", "float32_matmul_precision", "timeout"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command += ["--num-microbatches", str(number)]
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        with output.open("wb") as out, errors.open("wb") as err:
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=None if rank else out, stderr=err)
                for rank in range(arguments.nprocs)
            ]
        problem = None
        try:
            for rank in ranks:
                rank.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            problem = f"no end after {arguments.timeout:.0f} s (--timeout)"
        for rank in ranks:
            rank.kill()
            rank.wait()
        if problem is None and any(rank.returncode for rank in ranks):
            said = [line for line in errors.read_text(errors="replace").splitlines() if "Error" in line]
            problem = said[0].strip()[:200] if said else "a rank failed"
        lines = output.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"variant"')], problem


def run_rank(arguments: argparse.Namespace) -> int:
    """One rank: builds the variants and times them in turn."""
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
    from benchmark_pipeline_variants import Setting, build_variant

    setting = Setting(
        PRESETS[arguments.preset],
        arguments.num_microbatches[0],
        arguments.global_batch_size,
        arguments.rank,
        arguments.nprocs,
        BATCHES_A_SAMPLE,
    )
    steps, errors = {}, {}
    for name in ["ideal", *arguments.variants]:
        error = ""
        try:
            steps[name] = build_variant(name, setting)
            steps[name]()
        except Exception as problem:  # a peer that does not run is a row of the table
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:160]
        if slowest(float(bool(error)), cuda):
            steps.pop(name, None)
            errors[name] = error or "failed on another rank"
    records = time_in_turn(steps, arguments, cuda)
    records += [{"variant": name, "error": error} for name, error in errors.items()]
    if arguments.rank == 0:
        for record in records:
            print(json.dumps(record), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that would abort the interpreter's own way out


def time_in_turn(steps: dict[str, Step], arguments: argparse.Namespace, cuda: bool) -> list[dict[str, Any]]:
    """Round-robin after a round of warm-up; the slowest rank counts. Ratios are paired round by round."""
    import torch
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(arguments.rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            taken = slowest(time.perf_counter() - began, cuda) / getattr(step, "batches_per_call", 1)
            if round_number:
                seconds[name].append(taken / arguments.nprocs if name == "ideal" else taken)
    records: list[dict[str, Any]] = []
    for name, taken_by in seconds.items():
        record: dict[str, Any] = {"variant": name, "step_ms": round(1e3 * statistics.median(taken_by), 1)}
        for base, key in (("ideal", "over_ideal"), ("torch-1f1b", "over_torch_1f1b")):
            if base in seconds:
                pairs = zip(taken_by, seconds[base], strict=True)
                record[key] = round(statistics.median(own / other for own, other in pairs), 3)
        records.append(record)
    return records


def slowest(value: float, cuda: bool) -> float:
    """The largest of the ranks' values."""
    import torch
    import torch.distributed as dist

    box = torch.tensor([value], dtype=torch.float64, device="cuda" if cuda else "cpu")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def report(arguments: argparse.Namespace, number: int, records: list[dict[str, Any]], error: str | None) -> None:
    size = arguments.global_batch_size // number
    print(f"{arguments.preset}, {arguments.nprocs} ranks, {number} micro-batches of {size} sequences")
    print(f"{'variant':18s} {'step ms':>9s} {'/ ideal':>8s} {'/ torch 1F1B':>13s}")
    for row in records:
        if "error" in row:
            print(f"{row['variant']:18s} {row['error']}")
            continue
        ratios = [f"{row[key]:.3f}" if key in row else "-" for key in ("over_ideal", "over_torch_1f1b")]
        print(f"{row['variant']:18s} {row['step_ms']:9.1f} {ratios[0]:>8s} {ratios[1]:>13s}")
    if error is not None:
        print(f"error: {error}")
    print(flush=True)
    if arguments.json:
        setting = {"preset": arguments.preset, "nprocs": arguments.nprocs, "num_microbatches": number}
        with arguments.json.open("a") as file:
            file.writelines(json.dumps({**setting, **row}) + "\n" for row in records)


if __name__ == "__main__":
    sys.exit(main())
