"""Bad files: paths that are not there, YAML that is wrong -> the exact lines, and nothing but these lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv, problems_of

from megalite.checkpoint import resolve_checkpoint
from megalite.config import parse
from megalite.convert import HuggingFaceSource
from megalite.data import HuggingFaceTokenizer
from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.files import hub_advice

HUB = (
    "looks like a name on the Hub; nothing is downloaded here: "
    "run hf download org/Model-1B --local-dir DIR, and give DIR"
)
PATHS = [
    ("--data-path corpus.bin", "--data-path=corpus.bin: give the prefix, 'corpus'"),
    (
        "--data-path corpus",
        "--data-path=corpus: corpus.idx not found (nor a text file corpus); run tools/preprocess_data.py",
    ),
    (
        "--data-path 0.3 corpus 0.7 corpus",
        "--data-path=corpus: corpus.idx not found (nor a text file corpus); run tools/preprocess_data.py",
    ),
    (
        "--data-path 0.3 corpus 0.7",
        "--data-path=0.3 corpus 0.7: 0.3 is no prefix; a blend has a weight before each: 0.7 A 0.3 B",
    ),
    ("--data-path .", "--data-path=.: is a directory; give a file or the prefix of .bin and .idx files"),
    (
        "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok.json",
        "--tokenizer-model=tok.json: no such file",
    ),
    (
        "--mock-data --load nowhere",
        "--load=nowhere: no such directory; omit --load to start fresh, or name its new place",
    ),
    ("--mock-data --load org/Model-1B", f"--load=org/Model-1B: no such directory; {HUB}"),
    (
        "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/Model-1B",
        f"--tokenizer-model=org/Model-1B: no such file; {HUB}",
    ),
    ("--mock-data --data-path x.bin", "--mock-data: contradicts --data-path=x.bin; give one of them"),
]


@pytest.mark.parametrize(("changes", "line"), PATHS, ids=[row[0] for row in PATHS])
def test_missing_files(changes: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in problems_of(argv(changes, without="mock-data"))


def test_a_misspelt_file_leads_to_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("story.txt", "texts/story.jsonl", "corpus_text_document.idx", "notes.yaml"):
        (tmp_path / name).touch()
    told = {
        "corpus_text_document": "corpus_text_document.bin not found (nor a text file corpus_text_document); "
        "run tools/preprocess_data.py",
        "stoory.txt": "no such file; did you mean story.txt?",
        "story.jsnl": "story.jsnl.idx not found (nor a text file story.jsnl); run tools/preprocess_data.py",
        "texts/stoory.jsonl": "no such file; did you mean texts/story.jsonl?",
        "notes.txt": "no such file; give one that exists",
        "nowhere/story.txt": "no such file; give one that exists",
        "text/story.jsonl": "no such file; did you mean texts/story.jsonl?",
        "txts/stoory.jsonl": "no such file; did you mean texts/story.jsonl?",
        "txts/zoo.jsonl": "no such file; give one that exists",
        "corpus_txt_document": "corpus_txt_document.idx not found (nor a text file corpus_txt_document); "
        "did you mean corpus_text_document?",
        "corpus": "corpus.idx not found (nor a text file corpus); did you mean corpus_text_document?",
    }
    for path, line in told.items():
        assert problems_of(argv(f"--data-path {path}", without="mock-data")) == [f"--data-path={path}: {line}"]


def test_a_misspelt_path_of_a_tokenizer_leads_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").touch()
    for path in ("tokeniser/tokenizer.json", "tokenizer/tokeniser.json", "tokeniser/tokeniser.json"):
        (line,) = problems_of(argv(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}"))
        assert line == f"--tokenizer-model={path}: no such file; did you mean tokenizer/tokenizer.json?"


def test_a_misspelt_run_leads_to_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    for path in ("runs/firsd", "run/first", "runz/firsd"):
        assert problems_of(argv(f"--load {path}")) == [
            f"--load={path}: no such directory; did you mean runs/first? If it has moved, name its new place"
        ]
        with pytest.raises(CheckpointError, match="no such directory; did you mean runs/first[?]"):
            resolve_checkpoint(path)


def test_a_prefix_may_also_be_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    line = "--data-path=corpus: is a directory; give a file or the prefix of .bin and .idx files"
    assert line in problems_of(argv("--data-path corpus", without="mock-data"))
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    parse(argv("--data-path corpus", without="mock-data"))


def test_a_schedule_file_is_for_its_ranks_and_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = "ranks: 2\nstages: 0 1\nmicrobatches: 3\nrank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n"
    (tmp_path / "own.txt").write_text(own)
    fits = "--pipeline-schedule-file own.txt --nprocs 2 --pipeline-model-parallel-size 2 --micro-batch-size 2"
    flag = "--pipeline-schedule-file=own.txt: "
    parse(argv(f"{fits} --global-batch-size 6"))
    more = f"{flag}is written for 3 micro-batches per batch, not 4; use --global-batch-size=6"
    assert problems_of(argv(f"{fits} --global-batch-size 8")) == [more]
    ramp = (
        f"{flag}is written for 3 micro-batches per batch, not 1; a batch size that changes needs a --pipeline-schedule"
    )
    assert problems_of(argv(f"{fits} --global-batch-size 6 --rampup-batch-size 2 4 10")) == [ramp]
    alone = argv("--pipeline-schedule-file own.txt --micro-batch-size 2 --global-batch-size 6")
    assert problems_of(alone) == [f"{flag}is written for 2 ranks, not 1; use --pipeline-model-parallel-size=2"]
    (tmp_path / "own.txt").write_text(own.replace("1B1", "1X1"))
    (line,) = problems_of(argv(f"{fits} --global-batch-size 6"))
    assert line.startswith(f"{flag}rank 1: 1X1: no computation")


@pytest.mark.parametrize(("place", "what"), [("notes.txt", "is no directory"), ("notes.txt/run", "{} is no directory")])
def test_a_save_that_can_not_be_a_directory(place: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    line = f"--save={tmp_path / place}: {what.format(tmp_path / 'notes.txt')}; choose another --save"
    assert problems_of(argv(f"--save {tmp_path / place}")) == [line]


def test_an_empty_save_directory_may_be_loaded(tmp_path: Path) -> None:
    parse(argv(f"--save {tmp_path}/run --load {tmp_path}/run"))


# (text of run.yaml, the one line)
YAML = [
    ("hiden: 512\n", "run.yaml:1: unknown key 'hiden'; did you mean 'hidden_size'?"),
    ("model:\n  hiden: 512\n", "run.yaml:2: unknown key 'hiden'; did you mean 'hidden_size'?"),
    ("modle:\n  hidden_size: 512\n", "run.yaml:2: unknown section 'modle'; did you mean 'model'?"),
    ("training:\n  lr: 1.0\n", "run.yaml:2: 'lr' belongs to section 'optimizer', not 'training'"),
    ('seed: 1\nbf16: "no"\n', "run.yaml:2: bf16: expected true/false, got text 'no'"),
    ("min_lr: 3e-4x\n", "run.yaml:1: min_lr=3e-4x: not a number"),
    ("lr_decay_iters: 1:30\n", "run.yaml:1: lr_decay_iters=1:30: not an integer"),
    ("seed:\n", "run.yaml:1: seed: expected a value"),
    ("seed: [1, 2]\n", "run.yaml:1: seed: expected one value, got a list"),
    ("a: 1\nb:\n\tc: 1\n", "run.yaml:3:1: not valid YAML: tab used for indentation"),
    ("seed: 1\nseed: 2\n", "run.yaml:2: duplicate key 'seed' (first at run.yaml:1)"),
    ("a: &x 1\nb: *x\n", "run.yaml:1:4: anchors and aliases are not allowed; write the value out"),
    (
        "a: !!python/object/apply:os.system [ls]\n",
        "run.yaml:1:4: tags ('tag:yaml.org,2002:python/object/apply:os.system') are not allowed; write the plain value",
    ),
    ("a: [[[[[1]]]]]\n", "run.yaml:1:7: nested too deep; sections hold plain values and lists"),
    ("- 1\n", "run.yaml:1: expected 'key: value' lines"),
    ("model:\n  a:\n    b: 1\n", "run.yaml:2: 'a' is not a section; expected a plain value"),
    (
        "exit_signal: 15\n",
        "run.yaml:1: 'exit_signal': SIGTERM, SIGUSR1 and SIGHUP save and end the run",
    ),
    ("bf16: true\nfp16: true\n", "--fp16: contradicts --bf16; give one of them [run.yaml:2]"),
    (
        "save: x\nsave_interval: 0\n",
        "--save-interval=0: must be >= 1; leave it out to save only at the end [run.yaml:2]",
    ),
]


@pytest.mark.parametrize(("text", "line"), YAML, ids=[row[0] for row in YAML])
def test_yaml_mistakes_name_file_and_line(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert problems_of([*argv(), "--config", "run.yaml"]) == [line]


def test_yaml_file_that_is_missing_or_hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert problems_of([*argv(), "--config", "missing.yaml"]) == [
        f"--config=missing.yaml: no such file (cwd {tmp_path})"
    ]
    Path("big.yaml").write_text("#" * 300_000)
    assert problems_of([*argv(), "--config", "big.yaml"]) == [
        "--config=big.yaml: larger than 256 KiB, too large for a configuration"
    ]
    Path("bytes.yaml").write_bytes(b"seed: \xff\n")
    assert problems_of([*argv(), "--config", "bytes.yaml"]) == ["--config=bytes.yaml: not UTF-8 text (byte 6)"]
    Path("deep.yaml").write_text("[" * 200_000)
    assert problems_of([*argv(), "--config", "deep.yaml"]) == [
        "deep.yaml:1:5: nested too deep; sections hold plain values and lists"
    ]


def test_masters_go_into_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("")
    (tmp_path / "link").symlink_to(file)
    given = {file: "is no folder", tmp_path / "link": "is no folder", Path("/dev/null"): "is no folder"}
    for path, what in {**given, tmp_path / "none": "no such folder"}.items():
        (line,) = problems_of(argv(f"--optimizer-offload-path {path}"))
        assert line.startswith(f"--optimizer-offload-path={path}: {what}; ")


def test_a_name_on_the_hub_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (
        "gpt2",
        "runs/a",
        "a/b/c",
        "./a/b",
        "~/a",
        "/a/b",
        "../b",
        "org/tokenizer.json",
        "org/x.model",
        "a b/c",
    ):
        assert hub_advice(path) == "", path
    assert hub_advice("org/Model-1B") == HUB
    given = argv("--mock-data --load org/Model-1B --use-checkpoint-args")
    with pytest.raises(ConfigError) as refused:
        parse(given, read_offer=lambda *_: None)
    (line,) = refused.value.problems
    assert line == f"--load=org/Model-1B: no such directory; {HUB}"
    ways = {
        "`load`=org/Model-1B: no such directory": lambda: resolve_checkpoint("org/Model-1B"),
        "org/Model-1B: no such directory": lambda: HuggingFaceSource("org/Model-1B"),
        "`tokenizer_model`=org/Model-1B: no such file": lambda: HuggingFaceTokenizer.from_path("org/Model-1B"),
    }
    for begin, act in ways.items():
        with pytest.raises(MegaliteError) as caught:
            act()
        assert caught.value.text == f"{begin}; {HUB}"
