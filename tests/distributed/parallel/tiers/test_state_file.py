"""Masters and moments in a file change where numbers are, not the numbers; whatever the file meets is one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from equivalence.layouts import TINY, saved_tensors

from megalite.comm.world import World
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.parallel.tiers import StateFile, state_file
from megalite.testing import run_ranks, try_ranks
from megalite.train.run import run_training

TWO_LAYERS = ("--num-layers", "2", "--micro-batch-size", "2", "--ddp-bucket-size", "3000", "--hidden-dropout", "0.1")


def in_file(folder: Path) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    return "--offload", f"path={folder}"


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def test_killed_between_buckets_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    def command(folder: Path, *more: str) -> list[str]:
        argv = [*TINY, *TWO_LAYERS, "--zero-stage", "1", "--save-interval", "2", "--save", str(folder), *more]
        argv[argv.index("--train-iters") + 1] = "4"
        return [*argv, "--data-cache-path", str(tmp_path / "cache")]

    files = in_file(tmp_path / "files")
    run_ranks(whole_run, 2, command(tmp_path / "whole"))
    argv = command(tmp_path / "killed", *files, "--auto-resume")
    buckets = 10  # made at the start and stepped twice, then some of the third step
    case = try_ranks(whole_run, 2, argv, faults=[f"kill@opt_bucket:rank=1:after={3 * buckets + 3}"])
    assert case.outcome.culprit is not None, "nobody was killed"
    assert not [*(tmp_path / "files").iterdir()], "a killed run leaves its files"
    run_ranks(whole_run, 2, argv)
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "killed")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_state_is_in_the_file(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path))
    masters = file.empty((5000,), torch.float32).copy_(torch.arange(5000.0))
    moment = torch.full((10, 10), 3.0, dtype=torch.bfloat16)
    row = moment[2]
    file.take_in(moment)
    row_there = moment[2].fill_(4.0)
    file.let_go([region for region in map(file.region_of, (masters, row_there)) if region is not None])
    content = os.pread(file.descriptor, file.nbytes, 0)
    assert np.frombuffer(content, np.float32, 5000).tolist() == list(range(5000))
    halves = np.frombuffer(content, np.uint16, 100, offset=20480)  # the next page; a bf16 is the upper half of an fp32
    assert (halves[:20] == 0x4040).all() and (halves[20:30] == 0x4080).all() and (halves[30:] == 0x4040).all()
    assert row.eq(3.0).all() and moment[2].eq(4.0).all() and file.region_of(row) is None


def test_runs_share_a_folder_and_leave_no_name_in_it(tmp_path: Path) -> None:
    one, other = StateFile(str(tmp_path)), StateFile(str(tmp_path))
    first, second = one.empty((3,), torch.float64).copy_(torch.arange(3.0)), other.empty((3,), torch.float64)
    assert first.tolist() == [0, 1, 2] and second.eq(0).all() and not [*tmp_path.iterdir()]
    descriptor = one.descriptor
    del first, one
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def full_disk(*arguments: int, **more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_hold_it_is_refused_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    argv = [*TINY, *TWO_LAYERS, "--offload", f"path={missing}"]
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert caught.value.problems == [f"--offload path={missing}: no such folder; make it first"]
    with mock.patch.object(os, "access", lambda path, mode: False), pytest.raises(ConfigError) as caught:
        parse([*TINY, *TWO_LAYERS, *in_file(tmp_path)])
    assert caught.value.problems == [f"--offload path={tmp_path}: cannot be written to; give another folder"]
    with (
        mock.patch.object(state_file.tempfile, "TemporaryFile", full_disk),
        pytest.raises(ConfigError, match=r"no file can be written there \(No space left on device\); give"),
    ):
        StateFile(str(tmp_path))
    file = StateFile(str(tmp_path))
    with (
        mock.patch.object(state_file, "_reserve", full_disk),
        pytest.raises(ConfigError, match=r"no room for 4.2 MB more of masters and moments \(No space left on device\)"),
    ):
        file.empty((1 << 20,), torch.float32)
