"""`--recompute-num-layers`: one number, or one for each stage; flags, files, older saved configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv

from megalite.config import parse
from megalite.config.saved import dump_yaml, from_dict, to_dict
from megalite.errors import ConfigError
from megalite.inventory import given_plan

FULL = "--recompute-granularity full"
PP = "--pipeline-model-parallel-size"


def _argv(flags: str) -> list[str]:
    return argv(f"--num-layers 8 --global-batch-size 8 {flags}")


def test_one_number_and_one_for_each_stage(tmp_path: Path) -> None:
    one = parse(_argv(f"{FULL} --recompute-method block --recompute-num-layers 3"))
    assert [given_plan(one).recompute_of(stage) for stage in (0, 1)] == [("block", 3)] * 2
    several = parse(_argv(f"{FULL} --recompute-method block --recompute-num-layers 3 0 {PP} 2"), world_size=2)
    assert [given_plan(several).recompute_of(stage) for stage in (0, 1)] == [("block", 3), ("block", 0)]
    path = tmp_path / "run.yaml"
    for config, world_size in ((one, 1), (several, 2)):
        path.write_text(dump_yaml(config))
        assert parse(["--config", str(path)], world_size=world_size) == config == from_dict(to_dict(config))


def test_files_and_older_manifests_hold_one_number(tmp_path: Path) -> None:
    flags = f"{FULL} --recompute-method uniform"
    expected = parse(_argv(f"{flags} --recompute-num-layers 2"))
    path = tmp_path / "file.yaml"
    for value in ("2", "[2]"):
        path.write_text(f"recompute_num_layers: {value}\n")
        assert parse(["--config", str(path), *_argv(flags)]) == expected
    data = to_dict(expected)
    data["model"]["recompute_num_layers"] = 2  # as every manifest had it before stages had numbers of their own
    assert from_dict(data) == expected
    data["model"]["recompute_num_layers"] = None
    assert from_dict(data) == parse(_argv(flags))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            f"{FULL} --recompute-method block --recompute-num-layers 3 2 1 {PP} 2",
            f"--recompute-num-layers=3 2 1: 3 numbers for 2 stages ({PP}=2 x 1 chunks per rank); give 2, or one for "
            "all",
        ),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 3 2 {PP} 2 --pipeline-schedule zb-v",
            f"--recompute-num-layers=3 2: 2 numbers for 4 stages ({PP}=2 x 2 chunks per rank); give 4, or one for all",
        ),
        (
            f"{FULL} --recompute-num-layers 3 2 {PP} 2",
            "--recompute-num-layers=3 2: one number for each stage needs --recompute-method=block; give that, or one "
            "number",
        ),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 0 0 {PP} 2",
            "--recompute-num-layers=0 0: recomputes nothing; leave out --recompute-granularity=full",
        ),
        (f"--recompute-num-layers 2 1 {PP} 2", "--recompute-num-layers=2 1: needs --recompute-granularity=full"),
    ],
)
def test_what_does_not_go_together_is_one_line(flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(_argv(flags), world_size=2)
    assert caught.value.problems == [line]
