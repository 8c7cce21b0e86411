"""Any layout to any other: 40 random pairs (200 with --full) come back bit for bit, and each byte is stored once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoint_layouts import holds, load_as_ranks, make_model, random_layout, save_as_ranks
from safetensors import safe_open

from megalite.checkpoint.reading import read_manifest
from megalite.comm.rectangles import TensorShard
from megalite.errors import CheckpointError


def test_forty_random_pairs_are_bit_equal(tmp_path: Path, full: bool) -> None:
    for seed in range(200 if full else 40):
        rng = random.Random(seed)
        model = make_model(seed)
        source = random_layout(model, rng.randint(1, 6), rng, fill=True)
        target = random_layout(model, rng.randint(1, 6), rng, fill=False)
        # blocks of one page: a rectangle has several, and their borders lie inside rows
        path = save_as_ranks(tmp_path / str(seed), seed, source, block_bytes=4096)
        load_as_ranks(path, target)
        holds(model, target)
        stored = sum(p.stat().st_size for p in path.glob("*.safetensors"))
        headers = sum(f.header_bytes for f in read_manifest(path).files.values())
        assert stored - headers == sum(t.numel() * t.element_size() for t in model.values())


def test_blocks_smaller_than_a_row_and_strided_targets(tmp_path: Path) -> None:
    big = torch.arange(7 * 3000, dtype=torch.float32).view(7, 3000)
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (7, 3000), (0, 0), big)]], block_bytes=4096)
    assert len(read_manifest(path).files["rank_00000.safetensors"].shards[0].checksums) == 21
    columns = torch.zeros(1000, 7).t()
    load_as_ranks(path, [[TensorShard("w", (7, 3000), (0, 1500), columns)]])
    assert torch.equal(columns, big[:, 1500:2500])
    twice = [torch.zeros(7, 3000), torch.zeros(7, 3000)]
    load_as_ranks(path, [[TensorShard("w", (7, 3000), (0, 0), local) for local in twice]])
    assert torch.equal(twice[0], big) and torch.equal(twice[1], big)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    model = make_model(3)
    path = save_as_ranks(tmp_path, 5, [[TensorShard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in model.items()]])
    with safe_open(path / "rank_00000.safetensors", "pt") as file:  # the library, not our reader
        assert set(file.keys()) == set(model)
        for name, values in model.items():
            assert torch.equal(file.get_tensor(name), values)
        assert file.metadata()["save_id"] == "id5"


def test_weights_may_be_cast_only_on_request(tmp_path: Path) -> None:
    values = torch.randn(4, 4, dtype=torch.float64)
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), values)]])
    narrow = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"w: torch.bfloat16 \(checkpoint torch.float64\)"):
        load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), narrow)]])
    load_as_ranks(path, [[TensorShard("w", (4, 4), (0, 0), narrow)]], cast=True)
    assert torch.equal(narrow, values.bfloat16())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("v", (4, 4), "v: not in the checkpoint"),
        ("w", (4, 5), r"w: shape \[4, 5\] \(checkpoint \[4, 4\]\)"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    path = save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), torch.ones(4, 4))]])
    good = torch.zeros(4, 4)
    wanted = [TensorShard("w", (4, 4), (0, 0), good), TensorShard(name, shape, (0, 0), torch.zeros(shape))]
    with pytest.raises(CheckpointError, match=message):
        load_as_ranks(path, [wanted])
    assert not good.any()


def test_shards_that_do_not_tile_the_tensor_are_refused(tmp_path: Path) -> None:
    top, bottom = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(CheckpointError, match="tensor w: 8 of 16 elements"):
        save_as_ranks(tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), top)]])
    with pytest.raises(CheckpointError, match="tensor w: rectangles .* overlap"):
        save_as_ranks(
            tmp_path, 1, [[TensorShard("w", (4, 4), (0, 0), top)], [TensorShard("w", (4, 4), (1, 0), bottom)]]
        )
    with pytest.raises(CheckpointError, match="rank 1 has"):
        shards = [TensorShard("w", (2, 4), (0, 0), top), TensorShard("w", (2, 4), (0, 0), top.double(), 1)]
        save_as_ranks(tmp_path, 1, [[shard] for shard in shards])
    assert not any(tmp_path.iterdir())
