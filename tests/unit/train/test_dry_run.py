"""`--dry-run` of a run that is meant for another host: what this one lacks is said, and refuses nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megalite.checkpoint import saving
from megalite.config import config_problems, config_warnings, parse, parse_with_origins, read_unjudged
from megalite.errors import CheckpointError, ConfigError
from megalite.train.dry_run import dry_run
from megalite.train.run_data import resolve_tokenizer
from tests.source_tree import ROOT

QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--mock-data"]


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int = 10**9
    used: int = 10**9 - 1000
    free: int = 1000


def test_a_disk_without_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse_with_origins([*QUICKSTART, "--save", str(tmp_path / "a")])
    assert "warning" not in dry_run(parsed.config, parsed.origins, 1)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(CheckpointError, match="free some space"):
        saving.check_space(tmp_path, 1001)
    lines = [line for line in dry_run(parsed.config, parsed.origins, 1).splitlines() if "warning" in line]
    assert len(lines) == 1 and lines[0].startswith(f" warning: --save={tmp_path}/a: ")
    assert "free some space or choose another --save" in lines[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_mock_data_go_with_every_configuration(path: Path) -> None:
    """Whether it names data of its own or not, and a tokenizer whose files are nowhere."""
    config, _ = read_unjudged(["--config", str(path), "--mock-data"])
    assert config.data.mock_data and not config.data.data_path
    assert not [line for line in config_problems(config, 1) if re.search("tokenizer|vocab|file|data_path", line)]
    settled, tokenizer = resolve_tokenizer(config)
    numbers = config.data.tokenizer_type != "ByteTokenizer"
    assert tokenizer.kind == ("NullTokenizer" if numbers else "ByteTokenizer")
    assert settled.model.vocab_size == tokenizer.vocab_size == (config.model.vocab_size or 257)
    said = [line for line in config_warnings(config, 1) if "`mock_data` draws numbers below" in line]
    assert len(said) == numbers


def test_a_later_tokenizer_leaves_the_files_of_an_earlier_one_unread(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("tokenizer_type: GPT2BPETokenizer\nvocab_file: v\nmerge_file: m\nmock_data: true\n")
    base = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--config", str(file)]
    data = parse([*base, "--tokenizer-type=NullTokenizer", "--vocab-size=9"]).data
    assert (data.mock_data, data.vocab_file, data.merge_file) == (True, None, None)
    data = parse([*base, "--tokenizer-type=GPT2BPETokenizer", "--merge-file=n"], check_files=False).data
    assert (data.vocab_file, data.merge_file) == ("v", "n")
    for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer"):
        line = f"--tokenizer-type={kind}: its file is not given; .* or give --vocab-size"
        with pytest.raises(ConfigError, match=line):
            parse([*base, "--tokenizer-type", kind])


def test_a_script_of_another_host_needs_none_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run for a cluster, whose data and tokenizer are there; on a host that may be meant, they must exist."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    words = ["--dry-run", "--data-path", "far_document", "--vocab-file", "v.json", "--merge-file", "m.txt"]
    config = "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3"
    argv = [*config.split(), "--global-batch-size", "64", "--train-iters", "9", *words]
    parsed = parse_with_origins([*argv, "--nprocs", "16"])
    assert [line.split(":")[0] for line in parsed.warnings] == [
        "--data-path=far_document", "--vocab-file=v.json", "--merge-file=m.txt",
    ]  # fmt: skip
    text = dry_run(parsed.config, parsed.origins, 16)
    assert "vocabulary 50,257" in text and "on 16 x GPU" in text and "data_path: [far_document]" in text
    with pytest.raises(ConfigError, match="far_document.idx not found"):
        parse_with_origins([*argv, "--nprocs", "8"])
    with pytest.raises(ConfigError, match="far_document.idx not found"):
        parse_with_origins([word for word in argv if word != "--dry-run"] + ["--nprocs", "16"])
    unknown = parse_with_origins([*argv[:-4], "--tokenizer-model", "t.json", "--nprocs", "16"])
    with pytest.raises(ConfigError, match="--tokenizer-model=t.json: not on this host; give --vocab-size"):
        dry_run(unknown.config, unknown.origins, 16)
