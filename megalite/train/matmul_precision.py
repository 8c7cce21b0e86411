"""`--float32-matmul-precision`: how fp32 matrix products are computed.

    highest   the library's default path: what tests and equality use
    high      on GPUs tf32 or split bf16
    medium    on GPUs bf16; on CPUs without bf16 matrix instructions another library (oneDNN) with plain fp32 products
    auto      times the modes on this model's own product shapes and takes a faster one only where it is faster and its
              error stays in fp32's class

All ranks make the same choice: a GEMM must not depend on where it is computed. And it holds for the whole run: a
checkpoint holds it, so that a resume on the same type of device stays bit for bit.
"""

import logging
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.comm import Axis, World, agree_max, all_gather_json
from megalite.config import Config
from megalite.observe import Record

logger = logging.getLogger(__name__)

META = "float32_matmul_precision"
MODES = ("highest", "high", "medium")
# fp32's class: the error of a product of k terms in fp32 grows like sqrt(k) * 2^-24; tf32 (2^-11) is far outside.
ERROR_CLASS = 4.0
WORTH_IT = 1.05
ROUNDS = 5
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MatmulChoice:
    """How fp32 products are computed."""

    mode: str  # one of `MODES`
    device: str  # the type of device it was chosen for
    kept: bool = False  # it comes from a checkpoint


def set_matmul_precision(config: Config, device: torch.device, world: Axis, *, earlier: Any = None) -> MatmulChoice:
    """Sets torch's mode. Collective over the world.

    earlier: what the checkpoint that the run continues from has under `META`, None for a run of its own: `auto` keeps
    that choice on the same type of device.
    """
    training, kept = config.training, False
    mode = training.float32_matmul_precision
    if mode == "auto" and (training.precision.name != "fp32" or config.model.is_foreign):  # whose shapes are unknown
        mode = "highest"
    elif mode == "auto":
        chosen = dict(earlier) if isinstance(earlier, dict) else {}
        kept = chosen.get("device") == device.type and chosen.get("mode") in MODES
        mode = chosen["mode"] if kept else _measure(config, device, world)
    torch.set_float32_matmul_precision(mode)
    return MatmulChoice(mode, device.type, kept)


def _measure(config: Config, device: torch.device, world: Axis) -> str:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    rows = min(config.training.micro_batch_size * model.seq_length, 4096)
    shapes = [(rows, model.hidden_size, model.ffn_size // tp), (rows, model.ffn_size // tp, model.hidden_size)]
    results = {mode: _time_and_error(shapes, mode, device) for mode in MODES}
    base_time, base_error = results["highest"]
    best = "highest"
    for mode in MODES[1:]:
        seconds, error = results[mode]
        fits = error <= max(ERROR_CLASS * base_error, 1e-6)
        # Every rank must find it worth it: the slowest ratio and the worst error decide.
        slowest = agree_max(seconds * WORTH_IT / base_time if fits else float("inf"), world)
        if slowest < 1.0 and seconds < results[best][0]:
            best = mode
    best = MODES[int(agree_max(MODES.index(best), world))]
    if best != "highest":
        speed = base_time / results[best][0]
        logger.info("fp32 matrix products: mode %r, %.2f x the default's speed, error of fp32's class", best, speed)
    return best


def _time_and_error(shapes: list[tuple[int, int, int]], mode: str, device: torch.device) -> tuple[float, float]:
    """(seconds, largest relative error) of products of these shapes in one mode."""
    generator = torch.Generator().manual_seed(0)
    seconds, worst = 0.0, 0.0
    torch.set_float32_matmul_precision(mode)  # asking sets the one that is chosen
    for n, k, m in shapes:
        a, b = (torch.randn(shape, generator=generator).to(device) for shape in ((n, k), (k, m)))
        sample = a[:64].double() @ b.double()
        result = a @ b
        error = (result[:64].double() - sample).norm() / sample.norm()
        worst = max(worst, float(error))
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            result = a @ b
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds += min(times)
    return seconds, worst


def arithmetic_of(world: World, ranks: Axis, products: MatmulChoice) -> Record:
    """What decides the last bits of a run's numbers beside its configuration, for the start line of metrics.jsonl: the
    order in which floats are added. With torch's build, the processor (its vector instructions choose the kernels), the
    threads that share a sum, the hosts whose ranks it crosses and the mode of matrix products as in the run, the same
    flags give the same bits; `tools/replay.py` asks for them then, and for closeness elsewhere.

    `processor`, `threads` (of a rank on a CPU; 0 where a GPU computes), `hosts` (how many) and
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
