"""`torch_dist` of megatron.core 0.16.1 itself, which makes, loads and saves it; where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import saved_tensors
from torch import Tensor

from megalite import strangers
from megalite.checkpoint import CheckpointReader
from megalite.comm import World
from megalite.config.cli import parse
from megalite.convert import (
    CheckpointSource,
    KeptState,
    MegatronDistSource,
    open_megatron,
    state_of,
    write_checkpoint,
    write_torch_dist,
)
from megalite.convert.source import stored_shapes
from megalite.data.indexed import IndexedWriter
from megalite.testing import run_ranks
from megalite.train.run import open_run
from megalite.train.starting_point import offer_of
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import assert_same


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


CORE = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
needs_core = pytest.mark.skipif(not CORE, reason="megatron.core is not installed (megatron-core==0.16.1)")


def core(folder: Path, name: str, ranks: int = 1, **job: Any) -> dict[str, Any]:
    """Runs megatron.core; returns what a single process found."""
    program, text = str(Path(__file__).with_name("run_megatron_dist.py")), json.dumps({"name": name, **job})
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", program, str(folder), str(rank), text], stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    for process in started:
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error.decode()[-3000:]
    return torch.load(folder / f"{name}.pt") if ranks == 1 else {}


def logits_here(directory: Path, tokens: Tensor) -> Tensor:
    from megalite.inference import load_for_inference
    from megalite.microbatch import Microbatch

    loaded = load_for_inference(directory, device="cpu")
    rows, length = tokens.shape
    microbatch = Microbatch(
        tokens=tokens, labels=tokens, positions=torch.arange(length).expand(rows, length),
        loss_mask=torch.ones(rows, length), sample_ids=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip
    head: Any = loaded.model.get_submodule("head")
    with torch.no_grad():
        return head.logits(loaded.model.body(None, microbatch)).transpose(0, 1)


def keys_of(name: str) -> list[str]:
    return [name, f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}"]


def train_on(world: World, argv: list[str]) -> None:
    """One iteration through the product; the state is saved."""
    with open_run(parse(argv, world_size=world.size, read_offer=offer_of), world) as run:
        run.trainer.train_step(drain=True)
        run.state.save(run.trainer.progress)


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_a_run_of_megatron_core_goes_on_here(kind: str, tmp_path: Path) -> None:
    """Its third step there, in one process, and here on four ranks: the same masters and moments."""
    told = core(tmp_path, "two", kind=kind, train=2, save="two")
    core(tmp_path, "three", kind=kind, load="two/iter_0000002", train=1, save="three")
    source, after = (open_megatron(tmp_path / name, true_vocab_size=100) for name in ("two", "three"))
    assert isinstance(source, MegatronDistSource) and isinstance(after, MegatronDistSource)
    run, expected = state_of(source), state_of(after)
    assert run is not None and expected is not None and (run.iteration, run.steps, expected.steps) == (2, 2, 3)
    for ours, theirs in {
        "layers.1.attention.qkv.weight": "decoder.layers.1.self_attention.linear_qkv.weight",
        "layers.0.mlp_norm.weight": "decoder.layers.0.pre_mlp_layernorm.weight",
        "head.final_norm.weight": "decoder.final_layernorm.weight",
    }.items():
        found, there = {key: run.stored(key) for key in keys_of(ours)}, told["state"][theirs]
        assert torch.equal(found[ours], there["param"]), ours
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"optimizer/{moment}/{ours}"], there[moment]), (ours, moment)
    with IndexedWriter(tmp_path / "text", vocab_size=128) as writer:
        writer.add_document(told["tokens"][0].tolist() * 40)
    argv = (
        f"--load {tmp_path / 'two'} --trust-pickle --use-checkpoint-args --save {tmp_path / 'next'} --vocab-size 100 "
        f"--data-path {tmp_path / 'text'} --split 100,0,0 --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 10 --lr 1e-2 --clip-grad 0 "
        "--lr-decay-style constant --weight-decay 0 --eval-iters 0 --num-workers 0 --no-exit-signal-handler "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --adam-eps 1e-8"
    )
    run_ranks(train_on, 4, argv.split(), timeout=60)
    # written back, megatron.core loads it and has the same masters and moments
    there = CheckpointSource(tmp_path / "next")
    for ranks in (1, 2) if kind == "experts" else (1,):  # ranks that share experts have an optimizer more
        back, saved, state = f"back-{ranks}", f"saved-{ranks}", KeptState.of(there, ranks > 1)
        write_torch_dist(there, tmp_path / back, implementation="local", run=state)
        core(tmp_path, saved, ranks, kind=kind, load=f"{back}/iter_0000003", save=saved, ep=ranks, world=ranks)
        after_all = open_megatron(tmp_path / saved, true_vocab_size=100)
        assert isinstance(after_all, MegatronDistSource)
        kept = state_of(after_all)
        assert kept is not None and (kept.iteration, kept.steps) == (3, 3)
        for name in stored_shapes(source.model):
            for key in keys_of(name):
                assert torch.equal(kept.stored(key), CheckpointReader(there.path).read(key)), (ranks, key)
    found = saved_tensors(tmp_path / "next")
    for name in stored_shapes(source.model):
        for key in keys_of(name):
            values = expected.stored(key)
            close = (found[key] - values).abs().max() <= 2e-5 * values.abs().max() + 1e-9
            assert close, (key, found[key] - values)


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["gpt", "llama", "experts", "mixed", "sinks"])
def test_megatron_core_loads_what_is_written(kind: str, tmp_path: Path) -> None:
    told = core(tmp_path, "one", kind=kind, train=1, save="one")
    source = open_megatron(tmp_path / "one", true_vocab_size=100)
    write_torch_dist(source, tmp_path / "written", implementation="local")
    found = core(tmp_path, "again", kind=kind, weights="written/release")
    for name, values in told["weights"].items():  # rows of padding are not kept
        assert torch.equal(found["weights"][name][:100], values[:100]), name
    assert torch.equal(found["logits"], told["logits"])


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["gpt", "llama", "experts", "mixed", "sinks"])
def test_megatron_cores_own_files_are_read_at_any_layout(kind: str, tmp_path: Path) -> None:
    """One process trains and saves; its logits are ours. Two by two ranks load that and save it: the same tensors."""
    expected = core(tmp_path, "one", kind=kind, train=2, save="one")
    source = open_megatron(tmp_path / "one", true_vocab_size=100)
    write_checkpoint(source, tmp_path / "ours", dtype=torch.float32)
    found = logits_here(tmp_path / "ours", expected["tokens"])
    assert ((found - expected["logits"]).abs().max() / expected["logits"].abs().max()).item() < 5e-6
    tensors = {name: source.read(name) for name in stored_shapes(source.model)}
    for parallel in (False, True):
        name = f"four-{parallel}"
        core(tmp_path, name, 4, kind=kind, load="one/iter_0000002", save=name, tp=2, pp=2, parallel=parallel)
        again = open_megatron(tmp_path / name, true_vocab_size=100)
        assert_same({name: again.read(name) for name in tensors}, tensors)
