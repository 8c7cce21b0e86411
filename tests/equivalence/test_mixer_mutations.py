"""Each way in which a mixer can go quietly wrong turns its equality with one process red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import PropertyMock, patch

import pytest
import torch
from unit.convert import test_families as families

from equivalence.layouts import TINY, train_body
from equivalence.test_block_kinds import KINDS
from equivalence.test_further_tokens import KINDS as FURTHER
from megalite.comm.world import World
from megalite.config import RopeScaling
from megalite.convert import deepseek
from megalite.nn.attention import latent
from megalite.nn.delta import GatedDeltaNet
from megalite.testing import run_ranks
from megalite.testing.oracle import reference
from megalite.train.further import Further

TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"


def shared_keys_not_summed():
    right = latent.enter_parallel

    def enter(small, message, tp, *, sequence):
        return torch.cat((right(small, message, tp, sequence=sequence)[..., :-4], small[..., -4:]), -1)

    return patch.object(latent, "enter_parallel", enter)


def state_across_documents():
    from megalite.nn.delta import gated_delta

    return patch("megalite.nn.delta.gated_delta", lambda *args: gated_delta(*args[:-1], None))


def convolution_across_documents():
    from megalite.nn.delta import convolved

    return patch("megalite.nn.delta.convolved", lambda *args: convolved(*args[:-1], None))


def states_in_the_order_of_ranks():
    right = torch.Tensor.argsort
    return patch.object(
        torch.Tensor, "argsort", lambda x, **more: right(x, **more) if more or len(x) != 4 else torch.arange(4)
    )


def gradients_of_states_stay_on_their_rank():
    right = GatedDeltaNet._exchanged
    return patch.object(GatedDeltaNet, "_exchanged", lambda self, x: right(self, x).detach())


def further_tokens_counted_by_each_rank():
    right = Further.__call__
    return patch.object(Further, "__call__", lambda self, batches: right(replace(self, over=None), batches))


DELTA, LATENT, DOCUMENTS = KINDS["delta"], KINDS["latent plain"], FURTHER["documents"]
MUTATIONS: dict[Callable, tuple[str, str, int]] = {
    shared_keys_not_summed: (LATENT, TP2, 2),
    state_across_documents: (DELTA, "", 1),
    convolution_across_documents: (DELTA, "", 1),
    states_in_the_order_of_ranks: (DELTA, CP2, 2),
    gradients_of_states_stay_on_their_rank: (DELTA, CP2, 2),
    further_tokens_counted_by_each_rank: (DOCUMENTS, "", 2),
}


def mutated_body(world: World, argv: list[str], steps: int, name: str) -> list[float]:
    (mutation,) = [m for m in MUTATIONS if m.__name__ == name]
    with mutation():
        return train_body(world, argv, steps)[0]


@pytest.mark.landing
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_seen(mutation: Callable) -> None:
    model, layout, world_size = MUTATIONS[mutation]
    flags = [*TINY, *model.split(), "--micro-batch-size", "1"]
    expected = reference(tuple(flags), 3).losses
    losses = run_ranks(mutated_body, world_size, [*flags, *layout.split()], 3, mutation.__name__)[0]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-9, f"{mutation.__name__} went unseen"


FILES = {
    "interleaved channels as they come": lambda: patch.object(deepseek, "reordered", lambda rows, *_, **more: rows),
    "scores without YaRN's temperature": lambda: patch.object(
        RopeScaling, "latent_temperature", new_callable=PropertyMock, return_value=1.0
    ),
}


@pytest.mark.landing
@pytest.mark.parametrize("name", FILES)
def test_a_folder_read_wrongly_is_seen(name: str, tmp_path: Path) -> None:
    with FILES[name](), pytest.raises(AssertionError):
        families.test_round_trip_is_bit_equal_and_a_step_is_theirs("deepseek", tmp_path)
