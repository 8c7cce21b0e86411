"""One device beside its peers: tokens per second, MFU and peak memory of one GPT, eager and compiled, in one run.

    python tools/benchmark_single.py                                            # CPU: all three variants
    python tools/benchmark_single.py --preset 1b --micro-batch-size 8 --precision bf16     # a GPU
    python tools/benchmark_single.py --variants megalite torch --compile --json out.jsonl

All variants train the same GPT (learned positions, biases, tanh-GELU, tied embeddings) on the same tokens: forward,
backward, clipping by the global norm and fused AdamW on all parameters. They take turns in one process, so that a
noisy neighbour disturbs all alike; `ratio` compares tokens per second with the first variant, round by round. In bf16
megalite keeps bf16 weights with fp32 main gradients and masters; the peers use autocast over fp32 weights, as their
own training scripts do. MFU counts model FLOPs in Megatron's convention (causal attention halved, nothing recomputed)
against the data sheet's dense bf16 peak, where the device is known. Peak memory is the device's, a process of its own
for each variant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import run_tool
from megalite.extras import optional_package

PRESETS = {
    "tiny": {"L": 2, "h": 64, "heads": 2, "s": 32, "V": 256},
    "small": {"L": 6, "h": 384, "heads": 6, "s": 256, "V": 8192},
    "medium": {"L": 8, "h": 512, "heads": 8, "s": 512, "V": 8192},
    "gpt2": {"L": 12, "h": 768, "heads": 12, "s": 1024, "V": 50304},
    "1b": {"L": 24, "h": 2048, "heads": 16, "s": 2048, "V": 50304},
    "2b": {"L": 30, "h": 2304, "heads": 18, "s": 2048, "V": 50304},
}
VARIANTS = ("megalite", "torch", "transformers")
Step = Callable[[], Any]


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    if "transformers" in arguments.variants:
        optional_package("--variants=transformers", "transformers")
    if arguments.memory_of:
        print(json.dumps({"peak_mib": measure_memory(arguments)}))
        return
    records = measure_speed(arguments)
    if arguments.memory:
        for record in records:
            record["peak_mib"] = memory_in_a_process(record["variant"])
    report(arguments, records)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--float32-matmul-precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--compile", action="store_true", help="measure each variant compiled too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads; unset: torch's choice")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory too")
    parser.add_argument("--json", type=Path, help="append one line a variant to this file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure_speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants in turn, after two steps each for warm-up and compilation."""
    names = [f"{name}{suffix}" for suffix in ("", "-compile")[: 1 + arguments.compile] for name in arguments.variants]
    steps: dict[str, Step] = {}
    for name in names:
        steps[name] = build(name, arguments)
        first, second = float(steps[name]()), float(steps[name]())
        print(f"{name}: loss {first:.4f}, {second:.4f}", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    cfg = PRESETS[arguments.preset]
    tokens = arguments.micro_batch_size * cfg["s"]
    flops, peak = model_flops(cfg, arguments.micro_batch_size), device_peak(arguments.precision)
    records = []
    for name in names:
        typical = statistics.median(seconds[name])
        record: dict[str, Any] = {"variant": name, "step_ms": 1e3 * typical, "tokens_per_second": tokens / typical}
        pairs = zip(seconds[names[0]], seconds[name], strict=True)
        record["ratio"] = statistics.median(first / own for first, own in pairs)
        record["tflops"] = flops / typical / 1e12
        record["mfu"] = flops / typical / peak if peak else None
        records.append(record)
    return records


def timed(step: Step) -> float:
    import torch

    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def build(name: str, arguments: argparse.Namespace) -> Step:
    """The training step of a variant."""
    import torch

    import bench_adapter

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg = PRESETS[arguments.preset]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, cfg["V"], (arguments.micro_batch_size, cfg["s"] + 1), generator=generator).to(device)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    kind, _, compiled = name.partition("-")
    if kind == "megalite":
        prec = {"highest": "fp32", "medium": "fp32dnn"}.get(arguments.float32_matmul_precision, "fp32")
        ctx = {"cfg": cfg, "x": tokens, "y": labels, "prec": prec, "lr": 3e-4, "clip": 1.0}
        if arguments.precision == "bf16":
            ctx["prec"] = "bf16"
        return bench_adapter.build(
            ctx, bench_adapter.ParallelMesh.single(), tied=True, weight_decay=0.1, activation="gelu-tanh",
            compiled=bool(compiled),
        )  # fmt: skip
    model, loss_of = plain_gpt(cfg, device) if kind == "torch" else transformers_gpt(cfg, device)
    run = torch.compile(model) if compiled else model
    return peer_step(model, lambda: loss_of(run, tokens, labels), device, bf16=arguments.precision == "bf16")


def peer_step(model: Any, loss: Callable[[], Any], device: Any, *, bf16: bool) -> Step:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Any:
        half = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with half:
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def plain_gpt(cfg: dict[str, int], device: Any) -> tuple[Any, Callable[..., Any]]:
    """What one writes with torch.nn on an afternoon: fused projections, the library's attention and cross entropy."""
    import torch.nn.functional as F
    from torch import Tensor, arange, nn

    h, heads = cfg["h"], cfg["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x: Tensor) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (t.view(b, s, heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(cfg["V"], h), nn.Embedding(cfg["s"], h)
            self.blocks = nn.ModuleList(Block() for _ in range(cfg["L"]))
            self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, cfg["V"], bias=False)
            for parameter in self.parameters():
                nn.init.normal_(parameter, 0.0, 0.02) if parameter.dim() > 1 else None
            self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions(arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    return GPT().to(device), lambda run, ids, labels: run(ids, labels)


def transformers_gpt(cfg: dict[str, int], device: Any) -> tuple[Any, Callable[..., Any]]:
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": "V", "n_positions": "s", "n_embd": "h", "n_layer": "L", "n_head": "heads"}
    settings: dict[str, Any] = {name: cfg[letter] for name, letter in shape.items()}
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(**settings, attn_implementation="sdpa")  # type: ignore[call-arg, unused-ignore]

    def loss(run: Any, ids: Any, labels: Any) -> Any:
        return F.cross_entropy(run(input_ids=ids).logits.flatten(0, 1), labels.flatten())

    return GPT2LMHeadModel(config).to(device), loss


def model_flops(cfg: dict[str, int], batch: int) -> int:
    from bench_adapter import model_config
    from megalite.inventory import flops_per_iteration

    return flops_per_iteration(model_config(cfg, tied=True, activation="gelu-tanh"), batch)


def device_peak(precision: str) -> float | None:
    """Data-sheet FLOP/s; None where it is not known (CPUs, fp32)."""
    import torch

    from megalite.planner import peak_flops

    return peak_flops(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None


def memory_in_a_process(variant: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", variant]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(json.loads(output.splitlines()[-1])["peak_mib"])


def measure_memory(arguments: argparse.Namespace) -> int:
    """MiB: device peak on a GPU; on a CPU what two steps add to the resident peak of the imported libraries."""
    import torch

    if torch.cuda.is_available():
        step = build(arguments.memory_of, arguments)
        step()
        step()
        return int(torch.cuda.max_memory_allocated()) >> 20
    with contextlib.suppress(ImportError):  # loaded for every variant: it is not what is measured
        import transformers  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = build(arguments.memory_of, arguments)
    step()
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def report(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    print(f"{arguments.preset}, {arguments.micro_batch_size} sequences, {arguments.precision}")
    columns = f"{'step ms':>9s} {'tokens/s':>10s} {'ratio':>6s} {'TFLOP/s':>8s} {'MFU %':>6s} {'peak MiB':>9s}"
    print(f"{'variant':22s} {columns}")
    for record in records:
        share = f"{100 * record['mfu']:6.1f}" if record["mfu"] else f"{'-':>6s}"
        memory = f"{record['peak_mib']:9d}" if "peak_mib" in record else f"{'-':>9s}"
        cells = f"{record['step_ms']:9.1f} {record['tokens_per_second']:10.0f} {record['ratio']:6.3f}"
        print(f"{record['variant']:22s} {cells} {record['tflops']:8.3f} {share} {memory}")
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("preset", "micro_batch_size", "precision")}
        with arguments.json.open("a") as file:
            for record in records:
                file.write(json.dumps({**settings, **record}) + "\n")


if __name__ == "__main__":
    sys.exit(run_tool(main))
