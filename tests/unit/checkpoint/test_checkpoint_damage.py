"""Damage is never loaded: bit flips, truncation, missing files, mixed steps, hostile manifests. The file is named."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_layouts import holds, load_as_ranks, make_model, random_layout, save_as_ranks

from megalite.checkpoint import Checkpointer, verify_checkpoint
from megalite.checkpoint.format import (
    COMMITTED,
    MANIFEST,
    StoredTensor,
    commit_text,
    parse_manifest,
    structure_hash,
)
from megalite.checkpoint.reading import read_extra, read_manifest
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError

Json = dict[str, Any]


def whole_shards(seed: int) -> list[TensorShard]:
    return [
        TensorShard(name, tuple(t.shape), (0,) * t.dim(), torch.zeros_like(t)) for name, t in make_model(seed).items()
    ]


def load(path: Path, seed: int = 0) -> list[TensorShard]:
    shards = whole_shards(seed)
    Checkpointer(path.parent, world=Axis.single("world")).load(path, shards)
    return shards


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three ranks' checkpoint of make_model(0), blocks of one page."""
    layout = random_layout(make_model(0), 3, random.Random(5), fill=True)
    return save_as_ranks(tmp_path, 100, layout, block_bytes=4096)


def test_two_hundred_bit_flips_are_all_refused_with_the_file_named(saved: Path) -> None:
    rng = random.Random(0)
    files = sorted(saved.iterdir())
    assert {COMMITTED, MANIFEST, "tokenizer.json", "rank_00000.safetensors"} <= {path.name for path in files}
    for trial in range(200):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        bit = rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        # COMMITTED and the manifest prove each other: either may be the damaged one
        names = f"{MANIFEST}.*{COMMITTED}|format v" if path.name in (COMMITTED, MANIFEST) else path.name
        with pytest.raises(CheckpointError, match=names):
            load(saved)
        assert len(verify_checkpoint(saved)) == 1
        path.write_bytes(whole)
    holds(make_model(0), [load(saved)])
    assert verify_checkpoint(saved) == []


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99, None])
def test_truncated_or_missing_files_are_named_with_their_sizes(saved: Path, keep: float | None) -> None:
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        path.unlink()
        if keep is not None:
            path.write_bytes(whole[: int(len(whole) * keep)])
        with pytest.raises(CheckpointError) as caught:
            load(saved)
        message = str(caught.value)
        assert path.name in message or "COMMITTED" in message
        if path.suffix == ".safetensors":
            cut = f"{int(len(whole) * (keep or 0))} bytes, expected {len(whole)}"
            assert (cut if keep is not None else "missing") in message
        path.write_bytes(whole)
    load(saved)


def test_files_of_two_steps_do_not_mix(tmp_path: Path) -> None:
    layout = random_layout(make_model(0), 2, random.Random(1), fill=True)
    for shards in layout:
        for shard in shards:
            shard.local.fill_(1)
    old, new = (save_as_ranks(tmp_path, step, layout) for step in (1, 2))
    # the same tensors with the same values: only the save id in the header tells them apart
    for name in ("rank_00001.safetensors", MANIFEST, COMMITTED):
        mixed = tmp_path / "iter_0000009"
        shutil.copytree(new, mixed)
        shutil.copy(old / name, mixed / name)
        with pytest.raises(CheckpointError, match="rank_00001.safetensors|COMMITTED"):
            load(mixed)
        shutil.rmtree(mixed)


def test_links_are_refused(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    shutil.move(saved / "rank_00000.safetensors", target)
    os.symlink(target, saved / "rank_00000.safetensors")
    with pytest.raises(CheckpointError, match="rank_00000.safetensors: cannot be read"):
        load(saved)


def rewrite(path: Path, change: Any) -> None:
    """Changes the manifest as an attacker would: with a COMMITTED file that proves it."""
    document = json.loads((path / MANIFEST).read_bytes())
    result = change(document)
    raw = result if isinstance(result, bytes) else json.dumps(document).encode()
    (path / MANIFEST).write_bytes(raw)
    (path / COMMITTED).write_bytes(commit_text(raw))


def first_file(document: Json) -> Json:
    return document["files"]["rank_00000.safetensors"]


def reshape(document: Json, shape: list[int]) -> None:
    """Claims that the tensor is larger than what is stored of it."""
    document["tensors"]["w"]["shape"] = shape
    document["structure"] = structure_hash({"w": StoredTensor("F32", tuple(shape))})


def store_twice(document: Json) -> None:
    """Claims a second file with the same rectangle."""
    document["files"]["again.safetensors"] = first_file(document)


HOSTILE = {
    "climbs out": lambda d: d["files"].update({"../../etc/passwd": first_file(d)}),
    "absolute": lambda d: d["extra_files"].update({"/etc/passwd": {"bytes": 1, "checksum": "0" * 16}}),
    "hidden": lambda d: d["extra_files"].update({".bashrc": {"bytes": 1, "checksum": "0" * 16}}),
    "new line": lambda d: d["extra_files"].update({"a\n": {"bytes": 1, "checksum": "0" * 16}}),
    "file twice": lambda d: d["extra_files"].update({MANIFEST: {"bytes": 1, "checksum": "0" * 16}}),
    "huge shape": lambda d: d["tensors"]["w"].update(shape=[2**40, 2**40]),
    "negative": lambda d: first_file(d)["shards"][0].update(offset=[-1, 0]),
    "boolean": lambda d: d.update(step=True),
    "float": lambda d: first_file(d).update(bytes=1e3),
    "begin": lambda d: first_file(d)["shards"][0].update(begin=0),
    "outside": lambda d: first_file(d)["shards"][0].update(offset=[1, 0]),
    "dimensions": lambda d: first_file(d)["shards"][0].update(offset=[0]),
    "dtype": lambda d: d["tensors"]["w"].update(dtype="PICKLE"),
    "no checksums": lambda d: first_file(d)["shards"][0].update(checksums=[]),
    "bad checksum": lambda d: first_file(d)["shards"][0].update(checksums=["../" * 5]),
    "unknown tensor": lambda d: first_file(d)["shards"][0].update(tensor="other"),
    "not stored": lambda d: reshape(d, [8, 4]),
    "stored twice": lambda d: store_twice(d),
    "structure": lambda d: d.update(structure="0" * 16),
    "tiny blocks": lambda d: d.update(block_bytes=1),
    "huge blocks": lambda d: d.update(block_bytes=2**40),
    "huge header": lambda d: first_file(d).update(header_bytes=2**40),
    "no object": lambda d: b"[]",
    "no JSON": lambda d: b"\x80\x04cposix\nsystem\n.",
    "deep": lambda d: b"[" * 200_000,
    "long number": lambda d: b'{"version": ' + b"9" * 100_000 + b"}",
    "key twice": lambda d: b'{"format": "megalite-checkpoint", "format": "megalite-checkpoint"}',
    "meta": lambda d: d.update(meta=[1]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(tmp_path: Path, name: str) -> None:
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), torch.ones(4, 4))]])
    load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), torch.zeros(4, 4))]])
    rewrite(path, HOSTILE[name])
    with pytest.raises(CheckpointError, match="manifest.json"):
        load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), torch.zeros(4, 4))]])


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), torch.ones(4, 4))]])
    rewrite(path, lambda d: d.update(version=3))
    with pytest.raises(CheckpointError, match="format v3, this megalite reads <= v1; upgrade"):
        load(path)
    (path / COMMITTED).write_bytes((path / COMMITTED).read_bytes().replace(b"checkpoint 1", b"checkpoint 3"))
    with pytest.raises(CheckpointError, match="format v3, this megalite reads <= v1; upgrade"):
        load(path)


def test_a_checkpoint_of_an_older_format_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), torch.ones(4, 4))]])
    monkeypatch.setattr("megalite.checkpoint.format.VERSION", 2)
    into = torch.zeros(4, 4)
    load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), into)]])
    assert bool((into == 1).all())
    (path / COMMITTED).write_bytes((path / COMMITTED).read_bytes().replace(b"checkpoint 1", b"checkpoint 0"))
    with pytest.raises(CheckpointError, match="does not match"):
        load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), into)]])


def test_two_thousand_mutated_manifests_raise_nothing_but_our_error(saved: Path) -> None:
    raw = (saved / MANIFEST).read_bytes()
    rng = random.Random(1)
    words = [b"-1", b"1e9", b"null", b"[]", b"{}", b'""', b"true", b"99999999999999999999", b'"../x"', b"NaN"]
    for _ in range(2000):
        data = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 8)] = rng.choice([*words, bytes([rng.randrange(256)])])
        try:
            parse_manifest(bytes(data), "manifest.json")
        except CheckpointError:
            pass


def test_files_that_travel_along(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert read_extra(saved, manifest, "tokenizer.json") == b'{"model": "bytes"}'
    assert manifest.meta["consumed_samples"] == 100
    assert set(manifest.tensors) == set(make_model(0))
    for name in ("other.json", "../iter_0000100/tokenizer.json", MANIFEST):
        with pytest.raises(CheckpointError):
            read_extra(saved, manifest, name)
