"""What decides the last bits of a run's numbers beside its configuration, for the start line of metrics.jsonl.

A sum of floats depends on the order of its terms. With torch's build, the processor (its vector instructions choose the
kernels), the threads that share a sum, the hosts whose ranks it crosses and the mode of matrix products as in the run,
the same flags give the same bits; `tools/replay.py` asks for them then, and for closeness elsewhere.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from megalite.comm import Axis, World, all_gather_json
from megalite.observe import Record
from megalite.train.matmul_precision import MatmulChoice

CPU_INFO = Path("/proc/cpuinfo")


def arithmetic_of(world: World, ranks: Axis, products: MatmulChoice) -> Record:
    """`processor`, `threads` (of a rank on a CPU; 0 where a GPU computes), `hosts` (how many) and
    `float32_matmul_precision`. Where ranks differ in one of the first two, a list by rank. Collective."""
    on_cpu = world.device.type == "cpu"
    mine = [processor_name(world.device), torch.get_num_threads() if on_cpu else 0, world.host]
    processors, threads, hosts = zip(*all_gather_json(mine, ranks), strict=True)
    return {
        "processor": _alike(processors),
        "threads": _alike(threads),
        "hosts": len(set(hosts)),
        "float32_matmul_precision": products.mode,
    }


def _alike(values: tuple[Any, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else [*values]


def processor_name(device: torch.device) -> str:
    """The model of the GPU, or of the CPU with the instructions that torch uses there."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
