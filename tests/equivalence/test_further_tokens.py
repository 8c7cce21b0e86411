"""Multi-token prediction equals one process at every layout: its inputs and weights are made before ranks take their
parts, its losses are means over the batch, its word embedding is one with the first stage's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equivalence.layouts import TINY, Layout, compare
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.nn.head import Head
from megalite.testing import run_ranks
from megalite.train.run import open_run

LLAMA = "--num-layers 4 --model-type llama --num-query-groups 2 --clip-grad 0.05"
KINDS = {
    "untied": f"{LLAMA} --mtp num_layers=2 loss_scaling_factor=0.7",
    "tied": f"{LLAMA} --no-untie-embeddings-and-output-weights --mtp num_layers=1 loss_scaling_factor=2 "
    "--embedding-multiplier 3",
    "documents": f"{LLAMA} --mtp num_layers=2 loss_scaling_factor=0.7 --reset-position-ids --reset-attention-mask "
    "--eod-mask-loss --calculate-per-token-loss",
    "sparse": f"{LLAMA} --mtp num_layers=2 --num-experts 4 --moe-router score_function=sigmoid expert_bias "
    "--mla q_lora_rank=12 kv_lora_rank=8 qk_head_dim=6 qk_pos_emb_head_dim=4 v_head_dim=5",
}
KINDS["sparse"] = KINDS["sparse"].replace("--num-query-groups 2", "")
LAYOUTS = {
    "one": ("--micro-batch-size 1", 1),
    "dp zero3": ("--zero-stage 3 --micro-batch-size 2", 2),
    "tp": ("--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --zero-stage 1", 4),
    "zb-v cp": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --virtual-pipeline-model-parallel-size 2 "
                "--context-parallel-size 2 --micro-batch-size 1", 4),
    "2bw": ("--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --micro-batch-size 1", 4),
    "pp tp": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --tensor-model-parallel-size 2 "
              "--micro-batch-size 1 --zero-stage 2", 4),
}  # fmt: skip
QUICK = {("documents", "zb-v cp")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in QUICK else pytest.mark.landing)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_every_layout_is_one_process(kind: str, layout: str) -> None:
    flags, world_size = LAYOUTS[layout]
    compare(Layout(tuple(KINDS[kind].split()), tuple(flags.split()), world_size, delay=int(layout == "2bw")))


def losses_body(world: World, argv: list[str]) -> tuple[list[float], list[float]]:
    """(The losses that a step reports, the same by torch's own cross entropy of what each depth's norm returned; both
    of the first iteration.)"""
    found: dict[int, list[float]] = {0: [], 1: []}
    with open_run(parse(argv, world_size=world.size), world) as run:
        heads = [m for s in run.trainer.executor.stages.values() for m in s.modules[0].modules() if isinstance(m, Head)]
        for head in heads if world.size == 1 else ():

            def keep(k: int, inputs: tuple, h: torch.Tensor, head: Head = head) -> None:
                labels, far = inputs[2].labels, k + 1  # position i is asked for label i + k
                logits = (h[: len(h) - far].detach() @ head.output.weight.T.detach())[..., :61]
                found[k].append(float(F.cross_entropy(logits.flatten(0, 1), labels[:, far:].t().flatten())))

            for k, layer in enumerate(head.mtp.layers):
                layer.register_forward_hook(lambda _, inputs, h, k=k: keep(k, inputs, h))
        stats = run.trainer.train_step(drain=True)
    return [float(loss) for loss in stats.further], [sum(each) / max(1, len(each)) for each in found.values()]


def test_each_depth_reports_its_mean_loss() -> None:
    argv = [*TINY, *KINDS["untied"].split()]
    (reported, expected), *_ = run_ranks(losses_body, 1, [*argv, "--micro-batch-size", "1"])
    assert reported == pytest.approx(expected, rel=1e-12)
    for flags, size in (LAYOUTS["zb-v cp"], LAYOUTS["tp"]):
        for other, _ in run_ranks(losses_body, size, [*argv, *flags.split()]):
            assert other == pytest.approx(expected, rel=1e-12)
