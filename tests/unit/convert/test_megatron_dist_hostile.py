"""Directories of `torch_dist` that carry programs, or are damaged: refused in one line, nothing executed."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import strangers
from megalite.convert import (
    open_megatron,
    write_checkpoint,
)
from megalite.errors import MegaliteError
from tests.unit.convert.dcp_layout import change_metadata, made_torch_dist
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import peer


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def planted(canary: Path) -> dict[str, Any]:
    """Objects that leave a file behind where they are unpickled."""
    touch, program = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    return {
        "posix.system": Calls(os.system, touch),
        "posix.popen": Calls(os.popen, touch),
        "subprocess.Popen": Calls(subprocess.Popen, ["touch", str(canary)]),
        "subprocess.check_output": Calls(subprocess.check_output, ["touch", str(canary)]),
        "builtins.exec": Calls(exec, program),
        "builtins.eval": Calls(eval, f"__import__('pathlib').Path({str(canary)!r}).touch()"),
        "builtins.open": Calls(open, str(canary), "w"),
        "io.open": Calls(io.open, str(canary), "w"),
        "pathlib.touch": Calls(Path.touch, canary),
        "builtins.getattr": Calls(getattr, canary, "touch"),
        "importlib.import_module": Calls(importlib.import_module, "antigravity"),
        "builtins.__import__": Calls(__import__, "antigravity"),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))),
        "torch.load": Calls(torch.load, str(canary)),
        "torch.save": Calls(torch.save, 1, str(canary)),
        "torch.hub": Calls(torch.hub.load, "nobody/nothing", "x"),
        "zipfile": Calls(zipfile.ZipFile, str(canary), "w"),
        "os.mkdir": Calls(os.mkdir, str(canary)),
        "shutil": Calls(__import__("shutil").copy, __file__, str(canary)),
        "runpy": Calls(__import__("runpy").run_path, __file__),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("torch_dist") / "whole"
    made_torch_dist(there, peer("gpt"))
    return there


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(whole, tmp_path / "there")) / "iter_0000100"


def refused(directory: Path) -> str:
    """The one line that a conversion ends with."""
    with pytest.raises(MegaliteError) as caught:
        write_checkpoint(open_megatron(directory), directory.parent.parent / "ours")
    assert "\n" not in str(caught.value)
    assert not list((directory.parent.parent / "ours").glob("*"))
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_metadata_that_carries_a_program(protocol: int, directory: Path) -> None:
    canary, path = directory.parent / "canary", directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name, evil in planted(canary).items():
        metadata.planner_data = {"x": [evil]}
        path.write_bytes(pickle.dumps(metadata, protocol=protocol))
        line = refused(directory)
        assert "asks for" in line and "nothing of it was executed" in line, (name, line)
        assert not canary.exists(), name


@pytest.mark.parametrize("place", ["common.pt", "item"])
def test_an_archive_that_carries_a_program(place: str, directory: Path) -> None:
    canary = directory.parent / "canary"
    for name, evil in planted(canary).items():
        if place == "common.pt":
            torch.save({"args": None, "x": evil}, directory / "common.pt")
        else:
            replace_item(directory, NAME, evil)
        line = refused(directory)
        assert "holds no args" not in line and not canary.exists(), (name, line)


def replace_item(directory: Path, name: str, value: Any) -> None:
    """Another object in the place of a tensor, at the end of its file."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    index, stored = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == name)
    torch.save(value, content := io.BytesIO())
    path = directory / stored.relative_path
    stored.offset, stored.length = path.stat().st_size, len(content.getvalue())
    path.write_bytes(path.read_bytes() + content.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_opcodes_and_names_that_no_metadata_has(directory: Path) -> None:
    path = directory / ".metadata"
    for raw, line in [
        (b"\x80\x02(cos\nsystem\nX\x01\0\0\0xo.", "asks for os.system"),
        (b"(ios\nsystem\n.", "INST"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x02X\x01\0\0\0xQ.", "BINPERSID"),
        (b"\x80\x02]}b.", "gives a state to what is no record"),
        (b"\x80\x02X\x01\0\0\0x)R.", "calls what is no class"),
        (b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.", "without storage_data"),
        (b"\x80\x02}.", "is not one of torch.distributed.checkpoint"),
        (b"", "not a whole"),
        (b"\x80\x02]", "not a whole"),
    ]:
        path.write_bytes(raw)
        assert line in refused(directory), raw


NAME = "decoder.final_layernorm.weight"


def _stored(metadata: Any, name: str = NAME) -> Any:
    return next(s for i, s in metadata.storage_data.items() if i.fqn == name)


def _entry(metadata: Any, name: str = NAME) -> Any:
    return metadata.state_dict_metadata[name]


def _set(target: Callable[[Any], Any], **fields: Any) -> Callable[[Any], None]:
    def apply(metadata: Any) -> None:
        for key, value in fields.items():
            object.__setattr__(target(metadata), key, value)

    return apply


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_set(_stored, relative_path="../../secret"), "is not allowed"),
        (_set(_stored, relative_path="/etc/passwd"), "is not allowed"),
        (_set(_stored, relative_path="__9_9.distcp"), "__9_9.distcp"),
        (_set(_stored, offset=10**12), "the file is not whole"),
        (_set(_stored, length=1), "claims to be larger than its 1 bytes"),
        (_set(_stored, offset=-1), "not what torch.distributed.checkpoint writes"),
        (_set(_stored, transform_descriptors=["zstd"]), "compressed or encrypted"),
        (_set(_entry, size=torch.Size([33])), "1 of 33 elements"),
        (_set(_entry, chunks=[]), "32 of 32 elements"),
        (_set(lambda m: _entry(m).chunks[0], sizes=torch.Size([2**40])), "is not inside"),
        (_set(lambda m: _entry(m).properties, dtype=torch.float32), "its .metadata says ['torch.float32', [32]]"),
        (_set(lambda m: _entry(m).properties, dtype=torch.int64), "dtype torch.int64"),
        (lambda m: m.state_dict_metadata.pop(NAME), "tensors are missing: head.final_norm.weight"),
        (lambda m: m.state_dict_metadata.update({"decoder.layers.odd": _entry(m)}), "not a whole"),
        (_set(lambda m: m, storage_data={}), "not a whole"),
        (_set(lambda m: m, state_dict_metadata=[1]), "not a whole"),
    ],
)
def test_a_metadata_that_is_wrong(damage: Callable[[Any], None], line: str, directory: Path) -> None:
    change_metadata(directory, damage)
    assert line in refused(directory)


def test_chunks_that_overlap_and_other_models(directory: Path) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    first = _entry(metadata, name).chunks[0]
    change_metadata(directory, lambda m: _entry(m, name).chunks.append(first))
    assert "overlap" in refused(directory)
    common = {"args": None}
    torch.save(common, directory / "common.pt")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "holds no args" in refused(directory)
    (directory / "common.pt").unlink()
    assert "holds no common.pt" in refused(directory)


def test_a_flipped_bit_of_an_item_is_found(directory: Path) -> None:
    source = open_megatron(directory)
    path, _ = source.files.tensors["decoder.final_layernorm.weight"].chunks[0][1]  # type: ignore[union-attr]
    raw = bytearray(path.read_bytes())
    values = source.read("head.final_norm.weight")
    at = raw.index(values.numpy().tobytes())
    raw[at + 5] ^= 16
    path.write_bytes(raw)
    assert "the checksum of" in refused(directory)


def test_the_process_that_reads_it_is_another_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", subprocess.Popen)
    source = open_megatron(directory)
    assert source.files.unpickler.program.process.pid != os.getpid()  # type: ignore[union-attr]
    assert source.read("layers.3.mlp.fc2.weight").shape == (32, 128)
