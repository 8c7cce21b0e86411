"""`--dry-run` of a run that is meant for another host: what this one lacks is said, and refuses nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megalite.checkpoint import saving
from megalite.config import (
    config_problems,
    config_warnings,
    dump_yaml,
    parse,
    parse_with_origins,
    read_unjudged,
    with_vocab_size,
)
from megalite.data.indexed import IndexedWriter
from megalite.errors import CheckpointError, ConfigError, in_flags
from megalite.planner import Roofline, load_hardware, predict
from megalite.progress import duration
from megalite.train.dry_run import HostTooSmall, dry_run, time_text
from megalite.train.run_data import open_datasets, resolve_tokenizer
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


def test_it_says_which_rank_holds_which_layers() -> None:
    """Not more than a row where there are many stages, and whether somebody asked for this division."""
    small = [
        *QUICKSTART,
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--ffn-hidden-size",
        "176",
        "--vocab-size",
        "2048",
    ]
    small += ["--pipeline-model-parallel-size", "2"]
    for given, row in (
        ([], "Et*2|L: rank 0 embedding, 2 layers | rank 1 head (divided by the FLOPs of their forwards)"),
        (
            ["--pipeline-model-parallel-layout", "Et|tL"],
            "Et|tL: rank 0 embedding, 1 layer | rank 1 1 layer, head (given)",
        ),
    ):
        parsed = parse_with_origins([*small, *given], world_size=2)
        rows = dry_run(parsed.config, parsed.origins, 2).splitlines()
        assert [line.split(maxsplit=1)[1] for line in rows if line.startswith(" stages ")] == [row]
    alone = parse_with_origins(QUICKSTART)
    assert "\n stages " not in dry_run(alone.config, alone.origins, 1)


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


SMALL = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--global-batch-size 64 --train-iters 9"
).split()


def test_a_script_of_another_host_needs_none_of_its_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dry run for a cluster, whose data and tokenizer are there; on a host that may be meant, they must exist."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    words = ["--dry-run", "--data-path", "far_document", "--vocab-file", "v.json", "--merge-file", "m.txt"]
    argv = [*SMALL, *words]
    parsed = parse_with_origins([*argv, "--nprocs", "16"])
    assert not parsed.warnings, "each is said once, below"
    text = dry_run(parsed.config, parsed.origins, 16)
    for name in ("data_path`=far_document", "vocab_file`=v.json", "merge_file`=m.txt"):
        assert text.count(f" not here    `{name}") == 1, text
    assert "NullTokenizer" not in text
    assert " that of its files, which are not on this host; 50,257 tokens" in text
    assert "vocabulary 50,257" in text and "on 16 x GPU" in text and "data_path: [far_document]" in text
    assert in_flags(text).count("tools/rehearse.py, these flags and --num-devices 16 run each rank's code") == 1
    with pytest.raises(ConfigError, match="far_document.idx not found"):
        parse_with_origins([*argv, "--nprocs", "8"])
    with pytest.raises(ConfigError, match="far_document.idx not found"):
        parse_with_origins([word for word in argv if word != "--dry-run"] + ["--nprocs", "16"])
    unknown = parse_with_origins([*argv[:-4], "--tokenizer-model", "t.json", "--nprocs", "16"])
    caplog.clear()
    assert "vocabulary 128,256" in dry_run(unknown.config, unknown.origins, 16), "assumed, and said"
    assert "`tokenizer_model`=t.json: not on this host; 128,256 tokens are assumed, Llama 3's number" in caplog.text
    llama2 = [
        "--tokenizer-type",
        "Llama2Tokenizer",
        "--tokenizer-model",
        "t.model",
        "--nprocs",
        "16",
    ]  # as Mixtral's script
    unknown = parse_with_origins([*argv[:-4], *llama2])
    text = dry_run(unknown.config, unknown.origins, 16)
    assert "vocabulary 32,000" in text and "NullTokenizer" not in text
    assert " SentencePieceTokenizer, which is not on this host; 32,000 tokens" in text
    assert "32,000 tokens are assumed, Llama 2's and Mixtral's number: give `vocab_size`" in caplog.text
    caplog.clear()
    given = parse_with_origins([*argv[:-4], *llama2, "--vocab-size", "1000"])
    assert "vocabulary 1,000" in dry_run(given.config, given.origins, 16) and "assumed" not in caplog.text


def test_a_tokenizer_that_is_here_is_named_though_the_data_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text('{"a": 0, "b": 1, "<|endoftext|>": 2}')
    merges.write_text("#version: 0.2\n")
    words = f"--dry-run --data-path far_document --vocab-file {vocab} --merge-file {merges} --nprocs 16"
    parsed = parse_with_origins([*SMALL, *words.split()])
    text = dry_run(parsed.config, parsed.origins, 16)
    assert " GPT2BPETokenizer (3 ids" in text and "not on this host" not in text
    assert text.count(" not here    ") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host with GPUs is refused")
@pytest.mark.parametrize(
    ("flags", "ranks", "said", "start"),
    [
        ("", 1, "(1 rank does not fit into this host)", "flags without --dry-run start it"),
        ("--nprocs 2", 2, "(2 ranks do not fit into this host)", "flags without --dry-run and --nprocs start it"),
    ],
)
def test_what_does_not_fit_here_starts_elsewhere_by_the_flags_that_were_given(
    flags: str, ranks: int, said: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise HostTooSmall("predicted memory: too much; use less")

    monkeypatch.setitem(dry_run.__globals__, "check_local_memory", refuse)
    parsed = parse_with_origins([*QUICKSTART, *flags.split()])
    text = in_flags(dry_run(parsed.config, parsed.origins, ranks))
    assert said in text and start in text.splitlines()[-1], text


def test_what_is_not_default_is_printed_and_all_of_it_on_request() -> None:
    """`dry_run_all`. What is printed is enough to run it; the last line says whether a problem was found."""
    short = parse_with_origins([*QUICKSTART, "--dry-run"])
    lines = in_flags(dry_run(short.config, short.origins, 1)).splitlines()
    settings = lines[1 : lines.index("")]
    assert lines[0] == "# settings that are not defaults (all of them: --dry-run all)"
    assert not [line for line in settings if line.endswith(("# default", "null"))] and len(settings) < 40
    assert lines[-1] == " No problem found: the same command without --dry-run starts the run."
    assert [line for line in lines if line.startswith(" time        not known for this hardware")]
    assert not any("rehearse" in line for line in lines)  # of one rank
    full = parse_with_origins([*QUICKSTART, "--dry-run", "all"])
    everything = dry_run(full.config, full.origins, 1).splitlines()
    assert set(settings) <= set(everything) and "  log_rank: null" not in everything
    assert "  clip_grad: 1.0                              # default" in everything and len(everything) > 150


def test_the_short_settings_are_the_configuration(tmp_path: Path) -> None:
    parsed = parse_with_origins([*QUICKSTART, "--seed", "7", "--optimizer-args", "muon_momentum=0.9"])
    (tmp_path / "a.yaml").write_text(dump_yaml(parsed.config, parsed.origins, every=False))
    assert parse(["--config", str(tmp_path / "a.yaml")]) == parsed.config


def test_time_is_predicted_where_the_device_is_known() -> None:
    config = with_vocab_size(parse(["--config", str(ROOT / "configs" / "gpt2_124m.yaml"), "--mock-data"]), 50257)
    step, whole = re.findall(r"([\d.]+) s a step, (.*) in all", time_text(config, 1, "NVIDIA H100 80GB HBM3"))[0]
    hardware = load_hardware("h100")
    seconds = predict(config, 1, hardware, Roofline(hardware)).step_time
    assert float(step) == pytest.approx(seconds, rel=0.01)
    assert whole == duration(seconds * config.train_iterations(1))
    for unknown in ("", "NVIDIA L40S"):  # the second is known by its rate alone
        assert time_text(config, 1, unknown).startswith("not known for this hardware")


def test_flags_that_conversations_want_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start and by the dry run, each that is not given; of text there is nothing to say."""
    ids = np.arange(3000) % 200
    for name, marked in (("talks", True), ("text", False)):
        with IndexedWriter(tmp_path / name, vocab_size=257, marked=marked) as writer:
            writer.add_document(ids)
    with IndexedWriter(tmp_path / "talks_marks", dtype=np.dtype(np.uint8)) as writer:
        writer.add_document(np.full(len(ids), 1))

    def said(name: str, *more: str, dry: bool = False) -> str:
        data = ["--data-path", str(tmp_path / name), "--split", "1,0,0", "--eval-iters", "0"]
        flags = [*QUICKSTART[:2], *data, "--tokenizer-type", "ByteTokenizer", *more]
        parsed = parse_with_origins(flags)
        caplog.clear()
        if dry:
            dry_run(parsed.config, parsed.origins, 1)
        else:
            config, tokenizer = resolve_tokenizer(parsed.config)
            open_datasets(config, 1, tokenizer)
        cut = re.findall(
            r"a sample ends inside of (\S+) of (\S+) conversations \(100 %; each epoch counts\)", caplog.text
        )
        assert len(cut) == (name == "talks"), caplog.text
        return " ".join(re.findall("conversations are trained on.*", caplog.text))

    caplog.set_level("INFO")
    for dry in (False, True):
        both = said("talks", dry=dry)
        assert "without `reset_attention_mask` (" in both and "and without `calculate_per_token_loss` (" in both
        assert said("text", dry=dry) == ""
    one = said("talks", "--reset-attention-mask")
    assert "reset_attention_mask" not in one and "without `calculate_per_token_loss`" in one
    assert said("talks", "--reset-attention-mask", "--calculate-per-token-loss") == ""


def test_the_run_reads_what_the_dry_run_has_tokenised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "story.txt").write_text("once upon a time\n" * 2000)
    flags = ["--data-path", str(tmp_path / "story.txt"), "--split", "90,10,0", "--save", str(tmp_path / "runs" / "a")]
    parsed = parse_with_origins([*QUICKSTART[:2], *flags])
    caplog.set_level("INFO")
    text = dry_run(parsed.config, parsed.origins, 1)
    assert "No problem found: the same" in text
    tokens = 1800 * 17  # bytes of 90 % of the lines
    assert f" data        train {tokens:,} tokens, read {330 * 16 * 128 / tokens:.3g} times; valid" in text
    assert len(re.findall("tokenising the", caplog.text)) == 2 and not (tmp_path / "runs" / "a").exists()
    config, tokenizer = resolve_tokenizer(parsed.config)
    open_datasets(config, 1, tokenizer)
    assert len(re.findall("tokenising the", caplog.text)) == 2, "training tokenises it again"


def test_tokens_are_those_of_the_split(tmp_path: Path) -> None:
    """Of token files, too, which hold all splits; a file that a blend names twice counts once."""
    with IndexedWriter(tmp_path / "a", vocab_size=257) as writer:
        for _ in range(10):
            writer.add_document(np.arange(400) % 99)
    given = QUICKSTART[:2] + ["--tokenizer-type", "ByteTokenizer", "--split", "20,40,40", "--data-path"]
    for words, read in (([str(tmp_path / "a")], ", read 845 times"), ([str(tmp_path / "a")] * 2, ", read 845 times")):
        parsed = parse_with_origins([*given, *words])
        text = dry_run(parsed.config, parsed.origins, 1)
        assert f" data        train 800 tokens{read}; valid 1,600 tokens; test 1,600 tokens" in text, text


@pytest.mark.parametrize("flag", ["--tensorboard-dir", "--data-cache-path"])
def test_folders_that_cannot_be_written_are_found(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, problem in ((tmp_path / "file", "file is a file"), (Path("/proc/none"), "cannot write in /proc")):
        parsed = parse_with_origins([*QUICKSTART[:2], flag, str(folder)])
        with pytest.raises(CheckpointError, match=f"^{flag}={folder}: .*{problem}"):
            dry_run(parsed.config, parsed.origins, 1)


def test_a_tracker_without_its_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    words = [*QUICKSTART, "--prometheus", f"file={tmp_path / 'run.prom'}"]
    parsed = parse_with_origins(words)
    said = [line for line in dry_run(parsed.config, parsed.origins, 1).splitlines() if "prometheus_client" in line]
    assert len(said) == 1 and said[0].startswith(" warning: `prometheus_file`=")
