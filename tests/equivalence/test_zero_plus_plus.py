"""ZeRO++: a training equals its emulation in one process, partitions change no bit, and slow links carry what the paper
says (Wang et al. 2023, arXiv:2306.10209, table 1).

Flags by their other spelling: --zero-quantized-weights, --zero-quantized-gradients, --zero-hpz-partition-size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, assert_close, assert_same_tensors, train
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.parallel.zero import bucket, plus_plus, unshard
from megalite.testing import run_ranks
from megalite.testing.oracle import Pupil, Trajectory
from megalite.train.run import open_run

DP4 = "--zero-stage 3 --micro-batch-size 1"
MUON = "--optimizer muon --lr 1e-3"


def blocks_of(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.cat([flat, flat.new_zeros(-len(flat) % 64)]).view(-1, 64)


def in_8_bits(x: Tensor) -> Tensor:
    """Each block of 64 by 254 steps from its least to its largest element."""
    found = []
    for block in blocks_of(x):
        step = (block.max() - block.min()) / 254
        found.append(block.min() + torch.round((block - block.min()) / step) * step if step else block)
    return torch.cat(found)[: x.numel()].view(x.shape)


def in_4_bits(x: Tensor) -> Tensor:
    """Each block by 7 steps on both sides of zero; halves, and a thousandth more, toward zero."""
    found = []
    for block in blocks_of(x):
        step = block.abs().max() / 7
        found.append(block.sign() * torch.round(block.abs() / step - 1e-3) * step if step else block)
    return torch.cat(found)[: x.numel()].view(x.shape)


def emulated(
    argv: list[str],
    steps: int,
    ranks: int,
    partition: int,
    *,
    weights: bool,
    gradients: bool,
    within: tuple[str, ...] = ("",),
) -> Trajectory:
    """One process, micro-batches of one sample, replica after replica. within: how names of what travels begin."""
    pupil = Pupil(tuple(argv))
    for parameter in pupil.model.parameters():
        if weights and not parameter.requires_grad:  # the model beside adapters
            parameter.data = in_8_bits(parameter.data)
    losses, norms = [], []
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            used = pupil.weights()
            if weights:
                used |= {name: in_8_bits(used[name]) for name in pupil.parameters if name.startswith(within)}
            batch, loss = loader.next_batch(pupil.samples), 0.0
            total = {name: torch.zeros_like(master) for name, master in pupil.masters.items()}
            for first in range(0, len(batch), ranks):
                own = []
                for sample in batch[first : first + ranks]:
                    one, each = pupil.gradients(used, [sample])
                    loss += one / len(batch)
                    own.append({name: value / len(batch) for name, value in each.items()})
                for name in total:
                    total[name] += reduced(
                        [each[name] for each in own], partition, gradients and name.startswith(within)
                    )
            losses.append(loss)
            norms.append(pupil.update(total, step * pupil.samples))
    return Trajectory(losses, norms, pupil.tensors(), pupil.rule.unsettled, pupil.rule.magnified)


def reduced(values: list[Tensor], partition: int, quantized: bool) -> Tensor:
    """The sum over ranks, hop after hop."""
    rounded = in_4_bits if quantized else lambda x: x
    if partition > 1:
        groups = [values[i : i + partition] for i in range(0, len(values), partition)]
        values = [sum(map(rounded, group), torch.zeros_like(group[0])) for group in groups]
    return sum(map(rounded, values), torch.zeros_like(values[0])) if len(values) > 1 else values[0]


CASES = [
    ("", f"{DP4} --zero-plus-plus weights gradients partition=2", 4, 4, 2),
    (MUON, f"{DP4} --zero-plus-plus gradients", 4, 4, 1),  # slices as long as the matrices in them
    ("", f"{DP4} --zero-plus-plus weights --pipeline-model-parallel-size 2", 4, 2, 1),
    (MUON, f"{DP4} --zero-plus-plus weights gradients partition=2 --no-overlap-grad-reduce", 4, 4, 2),
    ("", f"{DP4} --zero-plus-plus weights gradients partition=4 --no-overlap-param-gather", 4, 4, 4),
    ("--num-layers 4", f"{DP4} --zero-plus-plus weights partition=2 --pipeline-schedule zb-h1 "
     "--pipeline-model-parallel-size 2", 8, 4, 2),
    ("--lora rank=3", f"{DP4} --zero-plus-plus weights partition=2", 4, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", range(2))
def test_a_training_equals_its_emulation(case: int) -> None:
    check_emulation(*CASES[case])


@pytest.mark.full
@pytest.mark.parametrize("case", range(2, len(CASES)))
def test_other_trainings_equal_their_emulation(case: int) -> None:
    check_emulation(*CASES[case])


def test_a_stage_of_one_shard_rounds_nothing_beside_one_of_several() -> None:
    """All ranks make the groups of both stages; of the first, nothing travels."""
    flags = f"{DP4} --zero-plus-plus weights gradients partition=2 --stage-meshes 1x1,1x2"
    check_emulation("", flags, 3, 2, 2, ("layers.1.", "head."))


def check_emulation(
    model: str, layout: str, world: int, replicas: int, partition: int, within: tuple[str, ...] = ("",)
) -> None:
    whole = [*TINY, "--num-layers", "2", "--untie-embeddings-and-output-weights", *model.split()]
    asked = layout.split()
    kinds = {"weights": "weights" in asked, "gradients": "gradients" in asked}
    expected = emulated([*whole, "--micro-batch-size", "1"], 3, replicas, partition, within=within, **kinds)
    found = train([*whole, *asked], world, 3)
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_close(found.norms, expected.norms, 1e-12, "gradient norm")
    assert_same_tensors(found.tensors, expected, 1e-11 * expected.magnified)


PP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule"
PARTED = {
    "": 4,
    "--context-parallel-size 2": 4,
    "--recompute-granularity full --recompute-method uniform": 4,
    "--tensor-model-parallel-size 2 --sequence-parallel": 8,
    "--num-distributed-optimizer-instances 2": 8,
    f"{PP2} chimera": 8,
    f"{PP2} breadth-first": 8,
}


@pytest.mark.parametrize("more", [more if not more else pytest.param(more, marks=pytest.mark.full) for more in PARTED])
def test_a_partition_has_the_bits_of_plain_zero(more: str) -> None:
    argv = [*TINY, "--num-layers", "3", *DP4.split(), *more.split()]
    plain, parted = (train([*argv, *own], PARTED[more], 2) for own in ([], ["--zero-plus-plus", "partition=2"]))
    assert plain.losses == parted.losses and plain.norms == parted.norms
    assert all(torch.equal(plain.tensors[name], parted.tensors[name]) for name in plain.tensors)


PARTITION = 2


def count_body(world: World, argv: list[str]) -> tuple[float, float, int]:
    """(Bytes that leave a node for weights and for gradients in the second step, bytes of the weights)."""
    sent = {"weights": 0.0, "gradients": 0.0}

    def note(kind: str, axis, nbytes: int, ranks: int) -> None:
        """ranks: of a node, each of which sends so many."""
        nodes = len({rank // PARTITION for rank in axis.ranks})
        sent[kind] += ranks * nbytes * (nodes - 1) / nodes

    def gather(out, x, axis, **how):
        note("weights", axis, out.nbytes, 1)  # a node sends its part to each other one
        return plain_gather(out, x, axis, **how)

    def scatter(out, x, axis, **how):
        note("gradients", axis, x.nbytes, 1)
        return plain_scatter(out, x, axis, **how)

    def trade(rows, traffic, axis):
        note("gradients", axis, rows.nbytes, PARTITION)
        return plain_trade(rows, traffic, axis)

    plain_gather, plain_scatter, plain_trade = (
        unshard.all_gather_into,
        bucket.reduce_scatter_into,
        plus_plus.start_all_to_all_rows,
    )
    with pytest.MonkeyPatch.context() as patch, open_run(parse(argv, world_size=world.size), world) as run:
        run.trainer.train_step(drain=False)
        for module in (unshard, plus_plus):
            patch.setattr(module, "all_gather_into", gather)
        buckets = [each for family in run.state.model.families for each in family.buckets]
        for each in buckets:
            if each.reduce_scatter is plain_scatter:
                each.reduce_scatter = scatter
        patch.setattr(plus_plus, "start_all_to_all_rows", trade)
        run.trainer.train_step(drain=True)
        numel = sum(each.numel for each in buckets)
    return sent["weights"], sent["gradients"], 2 * numel


def test_slow_links_carry_three_quarters_of_the_weights_instead_of_three_times() -> None:
    size = "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 --lr 1e-2"
    data = "--mock-data --vocab-size 64 --eval-iters 0 --num-workers 0 --train-iters 9 --bf16 --grad-reduce-in-bf16"
    argv = [*size.split(), *data.split(), *DP4.split(), "--device", "cpu"]
    plain = run_ranks(count_body, 4, argv)[0]
    less = run_ranks(count_body, 4, [*argv, "--zero-plus-plus", "weights", "gradients", f"partition={PARTITION}"])[0]
    whole = plain[2] / 2  # of two nodes each sends half
    assert plain[1] == whole and 1.8 * whole < plain[0] < 2 * whole  # the last layer stays from forward to backward
    assert less[0] == whole * (1 / 2 + 2 / 64)  # codes, and two numbers a block
    assert less[1] == whole * (1 / 4 + 1 / 64)
