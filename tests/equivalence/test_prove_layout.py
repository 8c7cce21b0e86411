"""The certificate: mistakes that are patched in are found and named, and what is right passes."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import prove_layout
from equivalence import test_mutations
from equivalence.layouts import TINY, draw
from megalite.checkpoint import Checkpointer
from megalite.comm import World
from megalite.config import parse
from megalite.nn.dropout import HiddenDropout
from megalite.parallel.pipeline import Stage
from megalite.parallel.zero.sub_optimizers import DeviceOptimizer
from megalite.proof import certificate, watch
from megalite.proof.shrink import shrink

MODEL = ["--num-layers", "2", "--hidden-dropout", "0.1"]
PP2 = ["--pipeline-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2"]
STEPS = 4


@contextlib.contextmanager
def norms_and_biases_decayed() -> Iterator[None]:
    right = DeviceOptimizer.begin_step

    def begin_step(self: DeviceOptimizer, **numbers: float) -> None:
        for group in self.rule.param_groups:
            group["decay"] = True
        right(self, **numbers)

    with patch.object(DeviceOptimizer, "begin_step", begin_step):
        yield


def dropout_keyed_by_place():
    right = HiddenDropout.__call__
    return patch.object(
        HiddenDropout,
        "__call__",
        lambda self, x, ids, places=None, *, training: right(
            self, x, torch.arange(len(ids)), places, training=training
        ),
    )


def input_gradients_not_summed_over_tp():
    from megalite.parallel.tensor import linear

    right = linear.start_sum

    def only_forward(partial: Tensor, axis: object, *, sequence: bool):
        backward = sys._getframe(1).f_code.co_name == "backward"
        return (partial, test_mutations._Done()) if backward else right(partial, axis, sequence=sequence)

    return patch.object(linear, "start_sum", only_forward)


def weight_gradient_of_a_split_backward_lost():
    right = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int) -> None:
        if microbatch == 1:
            self._deferred.pop(microbatch)
        else:
            right(self, microbatch)

    return patch.object(Stage, "backward_weight", backward_weight)


def second_moments_not_loaded():
    right = Checkpointer.load

    def load(self: Checkpointer, path, shards, **more):
        return right(self, path, [s for s in shards if not s.name.startswith("optimizer/exp_avg_sq/")], **more)

    return patch.object(Checkpointer, "load", load)


MISTAKES = {
    "loss_not_divided_by_m": ([], 1, r"iteration 1, backward of head: the weight of the loss .* is 3 times"),
    "gradient_not_reduced": ([], 2, r"iteration 1, reduce of \S+: the gradient of \S+ on rank"),
    "tied_embeddings_not_synchronised": (PP2, 2, r"iteration 1, reduce of embedding: the gradient of \S*word_emb"),
    "clipped_by_the_local_norm": (PP2, 2, r"iteration 1, norm of the model: the gradient norm"),
    "norm_gradients_not_summed_over_tp": (
        [*TP2, "--sequence-parallel"], 2, r"iteration 1, reduce of head: the gradient of head.final_norm",
    ),
    "newest_version_in_2bw": (
        [*PP2, "--pipeline-schedule", "2bw"], 2, r"iteration 2: backward of embedding .*: its weights were overwritten",
    ),
    "stale_microbatch": ([], 1, r"iteration 2, forward of embedding: sample 5 was never computed"),
    "norms_and_biases_decayed": (["--weight-decay", "0.1"], 1, r"iteration 1, step of layers.0: \S*(norm|bias)"),
    "dropout_keyed_by_place": (["--micro-batch-size", "2"], 2, r"iteration 1, forward of embedding: its output"),
    "input_gradients_not_summed_over_tp": (TP2, 2, r"iteration 1, backward of (head|layers.1): the gradient of its"),
    "weight_gradient_of_a_split_backward_lost": (
        [*PP2, "--pipeline-schedule", "zb-h1"], 2, r"iteration 1, backward of (head|layers.1): the gradient of ",
    ),
    "second_moments_not_loaded": (
        ["--zero-stage", "1"], 2, r"FAIL  its checkpoint at .*: iteration 2, checkpoint of \S+: optimizer/exp_avg_sq/",
    ),
}  # fmt: skip


def broken_body(world: World, config: str, reference: str, folder: str, steps: int, save_after: int, name: str):
    mistake = globals().get(name) or getattr(test_mutations, name)
    with mistake():
        return watch.train(world, config, reference, folder, steps, save_after)


def small_form(flags: list[str], ranks: int):
    config, world_size = prove_layout.resolve([*TINY, "--micro-batch-size", "1", *MODEL, *flags], ranks)
    return shrink(config, world_size, steps=STEPS, most_ranks=8)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_by_layer_and_action(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, ranks, account = MISTAKES[name]
    status = certificate.prove(small_form(flags, ranks), STEPS, print, rank=(broken_body, name))
    output = capsys.readouterr().out
    verdict = next((line for line in output.splitlines() if line.startswith(("FAIL", "PASS"))), "nothing")
    assert status == 1 and re.search(account, verdict), output


def certify(flags: list[str], ranks: int) -> None:
    assert certificate.prove(small_form(flags, ranks), STEPS, print) == 0, f"{' '.join(flags)} on {ranks} ranks"


@pytest.mark.landing
def test_a_curriculum_of_lengths_passes() -> None:
    """Also layers that differ; the small form keeps both."""
    unlike = "--position-embedding-type rope --window-size 5 --skip-freq window=2 rope=2".split()
    flags = [*unlike, "--context-parallel-size", "2", "--seq-length-schedule", "0:4 500:16"]
    small = small_form(flags, 2).config
    assert small.training.seq_length_schedule == f"0:{small.model.seq_length // 2} 1:{small.model.seq_length}"
    assert (small.model.window_attn_skip_freq, small.model.no_rope_freq) == ("1,0", "0,1")
    certify(flags, 2)


def test_random_configurations_pass(full: bool, fresh: int) -> None:
    for seed, count in ((3, 20 if full else 0), (fresh, 20 if full else 1)):
        rng = random.Random(seed)
        for number in range(count):
            case = draw(rng, want=lambda case: full or case.world_size <= 4)
            try:
                certify([*case.model, *case.layout], case.world_size)
            except BaseException:
                print(f"seed {seed}, configuration {number}: {case.command}")
                raise


def test_a_folder_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_layout.main([*TINY, "--keep", __file__]) == 2
    assert capsys.readouterr().err.startswith(f"error: --keep={__file__}: File exists; give a directory")


def test_float8_is_proved_by_rows_of_single_samples() -> None:
    argv = [*TINY, *MODEL, "--micro-batch-size", "4", "--fp8", "format=hybrid", "recipe=blockwise"]
    small = shrink(parse(argv), 1, steps=STEPS, most_ranks=4)
    given = small.config.training
    assert (given.micro_batch_size, given.float8.fp8_format, given.float8.fp8_recipe) == (1, "hybrid", "rowwise")
    assert "--fp8-recipe: blockwise -> rowwise" in small.changes


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_ranks_that_share_keys_do_so_in_the_small_form(groups: int) -> None:
    small = small_form(["--tensor-model-parallel-size", "4", "--num-query-groups", str(groups)], 4)
    model = small.config.model
    assert model.query_groups == groups and model.legal_tensor_size(4)
    assert model.query_groups < model.num_attention_heads or groups == 4
