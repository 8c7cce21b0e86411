"""Megatron-LM's files from a stranger: one line that names the file, nothing executed, nothing written."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import strangers
from megalite.config.model import ModelConfig
from megalite.convert import open_megatron, write_checkpoint, write_megatron
from megalite.convert.megatron_process import Unpickler
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from tests.unit.convert.megatron_layout import HereInstead, megatron_enum
from tests.unit.convert.test_megatron import Fixed

FILE = "release/mp_rank_01/model_optim_rng.pt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little GPT on two tensor-parallel ranks."""
    there = tmp_path_factory.mktemp("megatron") / "whole"
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=20)
    source: Any = Fixed(model)
    return write_megatron(source, there, tensor_parallel=2)


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "there"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


def refused(directory: Path, ckpt_step: int | None = None) -> str:
    """The one line that a conversion ends with."""
    with pytest.raises(MegaliteError) as caught:
        write_checkpoint(open_megatron(directory, ckpt_step), directory.parent / "ours")
    assert "\n" not in str(caught.value)
    assert not (directory.parent / "ours").exists()
    return str(caught.value)


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(file, weights_only=False)
    changed = change(content)
    torch.save(content if changed is None else changed, file)


def test_the_little_gpt_is_whole(directory: Path) -> None:
    write_checkpoint(open_megatron(directory), directory.parent / "ours")


def test_the_process_that_opens_pickles_is_another_one(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "Popen", subprocess.Popen)
    source = open_megatron(directory)
    process = source._unpickler.program.process
    assert process.pid != os.getpid()
    expected = source.read("layers.0.mlp.fc1.weight")
    canary = tmp_path / "canary"
    torch.save(Calls(os.system, f"touch {canary}"), tmp_path / "evil.pt")
    unpickler = source._unpickler
    with pytest.raises(CheckpointError, match=r"asks for posix\.system.*nothing of it was executed"):
        unpickler.open(tmp_path / "evil.pt")
    assert not canary.exists()
    assert torch.equal(source.read("layers.0.mlp.fc1.weight"), expected)  # it continues, with what it has opened
    process.kill()
    process.wait()
    with pytest.raises(CheckpointError, match="the process that opened it ended"):
        source.read("layers.0.mlp.fc1.weight")
    del source, unpickler
    assert process.stdout is not None and process.stdout.closed


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["args", "optimizer", "model", "top"])
@pytest.mark.parametrize("how", ["posix.system", "builtins.exec", "subprocess.Popen", "builtins.getattr"])
def test_a_pickle_that_carries_a_program(directory: Path, how: str, place: str, zipped: bool) -> None:
    canary = directory.parent / "canary"
    evil = {
        "posix.system": Calls(os.system, f"touch {canary}"),
        "builtins.exec": Calls(exec, f"open({str(canary)!r}, 'w')"),
        "subprocess.Popen": Calls(subprocess.Popen, ["touch", str(canary)]),
        "builtins.getattr": Calls(getattr, type(Path()), "touch"),
    }[how]
    file = directory / FILE
    content = torch.load(file, weights_only=False)
    whole: Any = evil if place == "top" else content | {place: {"x": evil} if place != "args" else evil}
    torch.save(whole, file, _use_new_zipfile_serialization=zipped)
    # protocol 2 has the module names of Python 2 (commands, __builtin__)
    assert re.search(rf"asks for \w+\.{how.split('.')[1]}, which no Megatron-LM checkpoint needs", refused(directory))
    assert not canary.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_an_enum_as_some_versions_of_python_write_it_is_no_program(
    directory: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3: getattr(class, name)."""
    file = directory / FILE
    content = torch.load(file, weights_only=False)
    kind = megatron_enum(monkeypatch)
    content["args"].model_type = Calls(getattr, type(kind), kind.name)
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    assert Unpickler().open(file).args is not None


def test_a_program_behind_an_allowed_package_is_a_stand_in(directory: Path) -> None:
    """`numpy.save` is asked for by a name of a package that such files use: it is not what is called."""
    canary = directory.parent / "canary.npy"
    named = str(canary).encode()
    raw = b"\x80\x02cnumpy\nsave\nX" + len(named).to_bytes(4, "little") + named + b"X\x01\0\0\0w\x86R."
    assert pickle.loads(raw) is None and canary.exists()  # as a pickle it works
    canary.unlink()
    file = directory / FILE
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    before = file.read_bytes()
    start = before.rindex(b"\x80\x02}")  # the object: what comes before is the machine, a dictionary too
    end = before.index(b".", start) + 1
    file.write_bytes(before[:start] + raw + before[end:])
    assert "holds no dictionary" in refused(directory)
    assert not canary.exists()


def test_files_that_are_none(directory: Path) -> None:
    file = directory / FILE
    whole = file.read_bytes()
    for wrong in (b"", b"hello", whole[: len(whole) // 2], b"PK\x03\x04" + bytes(100), b"\x80\x02."):
        file.write_bytes(wrong)
        assert f"{file}: not a " in refused(directory)
    for wrong_object in ([1], torch.ones(3), {"weights": torch.ones(3)}, {"model": [1]}):
        torch.save(wrong_object, file)
        assert str(file) in refused(directory)
    file.unlink()
    assert "mp_rank_01: holds no model_optim_rng.pt" in refused(directory)


def test_flipped_bits_never_become_weights(directory: Path) -> None:
    file = directory / FILE
    whole = file.read_bytes()
    expected = _weights(directory)
    generator = random.Random(1)
    silent = 0
    for _ in range(30):
        damaged = bytearray(whole)
        at = generator.randrange(len(damaged))
        damaged[at] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        try:
            found = _weights(directory)
        except MegaliteError as error:
            assert "\n" not in str(error)
        else:
            silent += 1
            assert all(torch.equal(found[name], expected[name]) for name in expected)  # padding of the archive
    assert silent < 30


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    source = open_megatron(directory)
    return {name: source.read(name) for name in source.parts}


def test_ranks_that_do_not_belong_together(directory: Path) -> None:
    file = directory / FILE
    rewrite(file, lambda content: content.update(iteration=7))
    assert "iteration 7, version 3.0; mp_rank_00 has 0 and 3.0: files of two checkpoints" in refused(directory)
    rewrite(file, lambda content: content.update(iteration=0))
    shutil.copytree(directory / "release/mp_rank_00", directory / "release/mp_rank_02")
    assert "args: say 2 x 1 ranks (tensor x pipeline), 3 x 1 are there" in refused(directory)
    shutil.rmtree(directory / "release/mp_rank_01")
    assert "tensor-parallel rank 1 of stage 0 is missing (3 x 1 expected)" in refused(directory)
    shutil.copytree(directory / "release/mp_rank_00", directory / "release/mp_rank_00_000_001")
    assert "mp_rank_00_000_001: not mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE" in refused(directory)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(num_experts=8), "tensors are missing: layers.0.mlp.experts.fc1"),
        (dict(position_embedding_type="yarn"), "args: position_embedding_type 'yarn' not supported"),
        (dict(num_layers=2), "tensors are missing: layers.1."),
        (dict(num_layers="1"), "args: num_layers '1' is not a positive integer"),
        (dict(num_layers=10**9), "args: 1000000000 layers: more than 10000"),
        (dict(hidden_size=None), "args: hidden_size is missing"),
        (dict(num_attention_heads=3), "shape [24, 16], args say a part of [72, 16]"),
        (dict(ffn_hidden_size=32), "mlp.linear_fc1.weight: shape [32, 16], args say a part of [32, 16]"),
        (dict(swiglu=True), "shape [32, 16], args say a part of [2, 64, 16]"),
        (dict(add_bias_linear=False), "a model of these args has no decoder.layers.0"),
        (dict(untie_embeddings_and_output_weights=True), "tensors are missing: head.output.weight"),
        (dict(tensor_model_parallel_size=4), "args: say 4 x 1 ranks"),
    ],
)
def test_args_that_are_not_the_weights(directory: Path, changes: dict[str, Any], line: str) -> None:
    file = directory / "release/mp_rank_00/model_optim_rng.pt"
    rewrite(file, lambda content: vars(content["args"]).update(changes))
    assert line in refused(directory)


def test_models_of_others(directory: Path) -> None:
    file = directory / "release/mp_rank_00/model_optim_rng.pt"
    rewrite(file, lambda content: content.update(args=None))
    assert "holds no args, so the number of attention heads is unknown" in refused(directory)
    rewrite(file, lambda content: content.update(args=argparse.Namespace(), checkpoint_version=1.5))
    assert "version" in refused(directory)
    bert = {"model": {"language_model": {"pooler": {"weight": torch.ones(2)}}}, "args": argparse.Namespace()}
    for rank in (0, 1):
        torch.save(bert, directory / f"release/mp_rank_0{rank}/model_optim_rng.pt")
    assert "no supported model has language_model.pooler.weight" in refused(directory)


def test_a_tied_copy_that_differs(directory: Path) -> None:
    for rank in (0, 1):
        copy = {"output_layer.weight": torch.zeros(128, 16)}
        rewrite(
            directory / f"release/mp_rank_0{rank}/model_optim_rng.pt",
            lambda content, c=copy: content["model"].update(c),
        )
    assert "output_layer.weight differs from the embedding, but args tie both" in refused(directory)


def test_directories_that_are_none(directory: Path, tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nowhere")
    assert "iter_0000009 is not there" in refused(directory, 9)
    assert "is one iteration; drop one of the two" in refused(directory / "release", 9)
    tracker = directory / "latest_checkpointed_iteration.txt"
    tracker.write_text("../../secret")
    assert "'../../secret' is neither a number nor release" in refused(directory)
    tracker.write_text("12")
    assert "iter_0000012 is not there" in refused(directory)
    (directory / "iter_0000012").mkdir()
    assert "iter_0000012 holds neither mp_rank_00 (Megatron-LM's format torch) nor .metadata" in refused(directory)
    (directory / "iter_0000012" / ".metadata").write_bytes(b"")
    assert "not a whole file of torch.save" in refused(directory)
    tracker.unlink()
    assert "give an iteration's directory or --ckpt-step" in refused(directory)
    with pytest.raises(ConfigError):
        open_megatron(directory / "release", true_vocab_size=10**6)
    with pytest.raises(CheckpointError, match="not empty"):
        write_checkpoint(open_megatron(directory / "release"), directory)
