"""`megalite.rehearse`: a function of the library's users, on ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite import World
from megalite.host_waits import allowed_wait
from megalite.library.agreement import Agreement
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.rehearsal.record import Call
from megalite.testing import run_ranks


def reads(found: Tensor, target: Tensor) -> Tensor:
    """A loss that asks the device."""
    return nn.functional.mse_loss(found, target) if found.sum().item() else found.sum()


class Masked(nn.Linear):
    """Makes tensors where those are that it gets."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y * torch.ones(8, device=x.device)).masked_fill(torch.zeros(8, device=y.device).bool(), -1.0)


def training(
    steps: Callable[[World], int],
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    layer: Callable[[], nn.Module] = lambda: nn.Linear(8, 8),
) -> Callable[[World], float]:
    """What docs/library.md tells its readers to write, for so many steps of each rank."""

    def train(world: World) -> float:
        torch.manual_seed(0)
        layers = [layer() for _ in range(4)]
        mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
        x = torch.empty(2, 8, device="meta")
        pipe = megalite.Pipeline(layers, schedule="zb-h1", mesh=mesh, example=x, loss=loss_of)
        optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=1e-3, zero_stage=1)
        torch.manual_seed(1 + mesh.coordinate("dp"))
        loss = torch.zeros(())
        for _ in range(steps(world)):
            loss = pipe.step([(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(2)])
            print(f"loss {loss:.4f}, norm {optimizer.step():.4f}")
        return loss.item()

    return train


def test_a_users_function_is_rehearsed_on_64_ranks() -> None:
    report = megalite.rehearse(training(lambda _: 3), nprocs=64, ranks=[1, 32, 63])
    assert list(report.faults) == []
    told = str(report)
    assert "3 steps, from start to end, of 4 of 64 ranks (0, 1, 32, 63)" in told
    assert "found           nothing" in told


def test_a_layer_may_make_tensors_where_its_input_is() -> None:
    report = megalite.rehearse(training(lambda _: 2, layer=Masked), nprocs=8, ranks=[0, 7])
    assert list(report.faults) == [] and "2 steps" in str(report)


def test_a_replica_that_ends_early_is_named() -> None:
    report = megalite.rehearse(training(lambda world: 2 - world.rank % 2), nprocs=4)
    assert report.fails
    told = str(report.faults[0])
    assert "rank 0 starts reduce_scatter" in told and "in iteration 2\n    and rank 1 starts no further one" in told


def test_a_wait_of_a_users_layer_is_named() -> None:
    (fault,) = megalite.rehearse(training(lambda _: 2, reads), nprocs=2).faults
    assert fault.warns
    assert "the host waits for the device 2 times a step: item()" in str(fault)
    assert "equivalence/test_rehearsed_function.py" in str(fault) and "reads" in str(fault)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_steps_of_the_library_wait_for_nothing(schedule: str) -> None:
    """Agreement of ranks, norms and a user's samples in host memory; two iterations back is what the host reads."""

    def train(world: World) -> None:
        mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        pipe = megalite.Pipeline(layers, schedule=schedule, mesh=mesh, example=torch.empty(2, 8), loss=reads_nothing)
        optimizer = megalite.ShardedOptimizer(pipe, lr=1e-3)
        for _ in range(4):
            pipe.step([(torch.ones(2, 8), torch.ones(2, 8)) for _ in range(2)])
            optimizer.step()

    report = megalite.rehearse(train, nprocs=2)
    assert list(report.faults) == []
    log = [(kind, text) for kind, _, _, _, text in report.records[0].log if kind in ("phase", "sync")]
    steps = log[log.index(("phase", "iteration 1")) : log.index(("phase", "the end"))]
    waits = [text for kind, text in steps if kind == "sync"]
    assert 0 < len(waits) <= 8 and {allowed_wait(text) for text in waits} == {"late"}


def reads_nothing(found: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, target)


def disagreeing(world: World, refuses: bool) -> list[str]:
    said, late = [], []
    with watched_gpu() as gpu:
        axis = megalite.ParallelMesh.build(rank=world.rank, size=world.size).world
        agreement = Agreement(axis, 0, DEVICE)
        for count, problem in ((4, None), (4, None), (3 if world.rank else 4, "bad" if refuses else None), (4, None)):
            try:
                late.append(agreement.late)
                agreement.reach(problem if world.rank else None, count, lambda: [[1.0, 2.0]])
            except megalite.ConfigError as error:
                said.append(str(error))
                break
        assert gpu.races == []
    return [*said, str(late)]


def test_ranks_that_disagree_later_are_named_at_the_next_batch() -> None:
    everywhere = "micro_batches: 3 on rank 1, 4 on rank 0 in the batch before; all give as many"
    for found in run_ranks(disagreeing, 2, False):
        assert found == [everywhere, "[False, True, True, True]"]
    first, other = run_ranks(disagreeing, 2, True)
    assert first[0] == "micro_batches: rank 1 has refused its own in the batch before; its line says why"
    assert other == ["bad", "[False, True, True]"]


def saved_between(world: World, folder: str, stop: int | None) -> list[float]:
    """Losses of four steps on samples in one buffer, with a checkpoint after `stop` that another run takes up."""
    losses: list[Tensor] = []
    with watched_gpu() as gpu:
        buffer = torch.empty(2, 8, pin_memory=True)

        def made() -> tuple[megalite.Pipeline, megalite.ShardedOptimizer]:
            torch.manual_seed(0)
            layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(2)]
            pipe = megalite.Pipeline(layers, example=torch.empty(2, 8), loss=reads_nothing, device=DEVICE)
            return pipe, megalite.ShardedOptimizer(pipe, "adamw", lr=0.1)

        pipe, optimizer = made()
        for step in range(4):
            if step == stop:
                place = optimizer.save(folder, step)
                pipe, optimizer = made()
                optimizer.load(str(place))
            losses.append(pipe.step([(buffer.fill_(step + 1.0), torch.zeros(2, 8))]))
            optimizer.step()
            buffer.zero_()  # the host has gone on
        assert gpu.races == []
        return [float(x.cpu()) for x in losses]


def test_a_checkpoint_counts_the_update_whose_outcome_nobody_has_read(tmp_path: Path) -> None:
    straight = run_ranks(saved_between, 1, "", None)[0]
    assert run_ranks(saved_between, 1, str(tmp_path), 2)[0] == straight
    assert straight[0] != straight[1]


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(megalite.ConfigError, match="rank 2: there are ranks 0 to 1"):
        megalite.rehearse(training(lambda _: 1), nprocs=2, ranks=[2])


def told(calls: list[Call]) -> list[tuple[object, ...]]:
    """All but gathered texts, whose first kilobyte travels alone."""
    every = [(c.kind, c.communicator.ranks, c.peer, c.dtype, c.op, c.nbytes, c.sent) for c in calls]
    return [each for each in every if each[3] != "uint8"]


def body(world: World) -> list[tuple[object, ...]]:
    with watched_gpu() as gpu:
        training(lambda _: 2)(replace(world, device=DEVICE))
        return told(gpu.calls)


@pytest.mark.landing
def test_its_record_is_that_of_real_ranks() -> None:
    real = run_ranks(body, 4)
    records = megalite.rehearse(training(lambda _: 2), nprocs=4).records
    assert [told(list(records[rank].calls)) for rank in range(4)] == real
    assert min(map(len, real)) > 10
