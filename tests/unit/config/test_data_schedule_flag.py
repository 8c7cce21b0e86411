"""What is wrong with a `--data-schedule` is one line before a rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.cli import parse_with_origins
from megalite.errors import ConfigError, in_flags

SIZES = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-3"
FORM = "write it like '0:web.txt 4T:anneal.txt'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("some text " * 99)
    Path("a.txt").write_text("text")
    Path("b.txt").write_text("0.5 text 0.5 hdfs://bucket/text")
    return tmp_path


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("0:a.txt 5K a.txt", f"--data-schedule='0:a.txt 5K a.txt': '5K' is not TOKENS:FILE; {FORM}"),
        ("5:a.txt", f"--data-schedule='5:a.txt': the first step must begin at 0 tokens; {FORM}"),
        ("0:a.txt 5:a.txt 3:a.txt", f"--data-schedule='0:a.txt 5:a.txt 3:a.txt': the token counts must rise; {FORM}"),
        ("0:a.txt 4K:", f"--data-schedule='0:a.txt 4K:': '4K:' is not TOKENS:FILE; {FORM}"),
        ("0:a.txt 4K:c.txt", "--data-schedule: c.txt: no such file"),
        ("0:a.txt 4K:s3://x/c", "--data-schedule: s3://x/c is a URL"),
        ("0:b.txt", "--data-schedule: b.txt: hdfs://bucket/text is a URL"),
    ],
)
def test_problems(steps: str, problem: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_with_origins([*SIZES.split(), "--train-samples", "100", "--data-schedule", steps])
    (line,) = str(in_flags(caught.value.text)).splitlines()
    assert line.startswith(problem)


def test_a_phase_that_is_never_reached_is_named(folder: Path) -> None:
    flags = [*SIZES.split(), "--train-samples", "100", "--data-schedule", "0:a.txt 1T:a.txt"]
    told = [in_flags(warning) for warning in parse_with_origins(flags).warnings]
    assert "--data-schedule=0:a.txt 1T:a.txt: a.txt is never reached, the training ends after 100 samples" in told
