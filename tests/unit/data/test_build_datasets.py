"""The one entry: raw text, JSONL, the default corpus, mock data, blends; caches that cannot be stale; resumed
runs; bad input.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_inputs import config, shared_file, tokens_of, write_documents

from megalite.config.data import DataConfig
from megalite.data import build_datasets, build_tokenizer
from megalite.data.blend import BlendedDataset
from megalite.data.build import Datasets
from megalite.data.cache import cached_folder
from megalite.data.corpus import stdlib_files
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from megalite.errors import DataError

TEXT = "".join(f"{n} bottles of beer on the wall – take one down.\n" for n in range(200, 0, -1))


def build(cfg: DataConfig, cache: Path | None, tokenizer: Tokenizer | None = None, **options: Any) -> Datasets:
    defaults = {"seq_length": 16, "train_samples": 50, "valid_samples": 4, "test_samples": 0, "seed": 1}
    return build_datasets(cfg, tokenizer=tokenizer or build_tokenizer(cfg), cache_dir=cache, **{**defaults, **options})


def stream(data: Any) -> list[int]:
    """All tokens of a split, in the order of its documents."""
    assert isinstance(data, GPTDataset)
    return [int(t) for i in range(data.begin, data.end) for t in data.store.get(i)]


def order(data: Any, stop: int | None = None) -> list[list[int]]:
    return [tokens_of(data, k) for k in range(stop or len(data))]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_raw_text_is_cut_by_characters_before_tokenising(text_file: Path, tmp_path: Path) -> None:
    data = build(config(data_path=(str(text_file),), split="80,15,5"), tmp_path / "cache", test_samples=2)
    cut = [0, round(0.8 * len(TEXT)), round(0.95 * len(TEXT)), len(TEXT)]
    for split, low, high in zip((data.train, data.valid, data.test), cut[:-1], cut[1:], strict=True):
        assert stream(split) == list(TEXT[low:high].encode())


def test_characters_are_those_of_the_whole_file(text_file: Path, tmp_path: Path) -> None:
    cfg = config(data_path=(str(text_file),), split="90,10", tokenizer_type="CharTokenizer")
    tokenizer = build_tokenizer(cfg)
    assert tokenizer.vocab_size == len(set(TEXT)) and tokenizer.eod_id is None
    data = build(cfg, tmp_path / "cache", tokenizer)
    assert tokenizer.decode(stream(data.valid)) == TEXT[round(0.9 * len(TEXT)) :]


def test_the_character_recipe_has_65_symbols(tmp_path: Path) -> None:
    file = shared_file("tinyshakespeare/input.txt")
    cfg = config(data_path=(str(file),), split="90,10", tokenizer_type="CharTokenizer")
    tokenizer = build_tokenizer(cfg)
    data = build(cfg, tmp_path / "cache", tokenizer, seq_length=64)
    assert tokenizer.vocab_size == 65
    assert data.train is not None and data.valid is not None
    assert len(stream(data.valid)) == pytest.approx(0.1 * len(file.read_text()), abs=1)


def test_jsonl_is_split_by_document_and_documents_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"document {n} " * (n + 1) for n in range(10)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts) + "\n")
    data = build(config(data_path=(str(path),), split="8,2"), tmp_path / "cache")
    assert stream(data.valid) == [b for t in texts[8:] for b in (*t.encode(), 256)]
    assert isinstance(data.train, GPTDataset) and data.train.end == 8


def test_documents_that_no_sample_holds_whole_are_told_where_they_keep_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (7, 8, 9, 40)))
    apart = config(data_path=(str(path),), split="1,0,0")
    with caplog.at_level(logging.WARNING):
        build(apart, tmp_path, seq_length=9, valid_samples=0)
        build(replace(apart, reset_attention_mask=True), tmp_path, seq_length=41, valid_samples=0)
        assert caplog.text == ""
        build(replace(apart, reset_attention_mask=True), tmp_path, seq_length=9, valid_samples=0)
    [line] = caplog.messages  # a document ends with a token of its own
    assert "a.jsonl: 2 of 4 documents are longer than `seq_length`=9 (the longest has 41 tokens)" in line


def test_the_default_corpus_holds_out_every_twentieth_file(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    (root / "sub" / "test").mkdir(parents=True)
    (root / "sub" / "test" / "no.py").write_text("left out")
    names = [f"m{n:02d}.py" if n % 2 else f"sub/m{n:02d}.py" for n in range(45)]
    for name in names:
        (root / name).write_text(f"# {name}\n")
    files = [f.relative_to(root).as_posix() for f in stdlib_files(str(root))]
    assert files == sorted(names)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"--data-path: not given, .*\(0 Python sources in .*name a text file"):
        stdlib_files(str(empty))


def test_a_sliver_of_a_test_split_is_passed_over(
    text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(data_path=(str(text_file),))
    with caplog.at_level(logging.WARNING):
        data = build(cfg, tmp_path, test_samples=None)
    assert data.test is None and "no final test: --data-path=" in caplog.text


def test_real_default_corpus(tmp_path: Path) -> None:
    data = build(config(), tmp_path, ByteTokenizer(), seq_length=128, test_samples=None)
    assert data.test is None
    texts = [text for text in (file.read_text(encoding="utf-8") for file in stdlib_files()[19:40:20]) if text.strip()]
    assert stream(data.valid)[: len(texts[0].encode())] == list(texts[0].encode())
    assert isinstance(data.train, GPTDataset) and isinstance(data.valid, GPTDataset)
    assert 0.01 < data.valid.tokens_per_epoch / data.train.tokens_per_epoch < 0.2
    assert data.train.store.get(0)[-1] == 256


def test_mock_data_depend_on_seed_and_document_only(tmp_path: Path) -> None:
    cfg = config(mock_data=True, split="8,1,1")
    tokenizer = build_tokenizer(cfg, vocab_size=50)
    assert isinstance(tokenizer, NullTokenizer)
    one, two, other = (build(cfg, tmp_path / str(n), tokenizer, seed=seed) for n, seed in enumerate([1, 1, 2]))
    assert order(one.train, 20) == order(two.train, 20) != order(other.train, 20)
    tokens = np.array(order(one.train, 50))
    assert tokens.min() >= 0 and tokens.max() < 50
    assert isinstance(one.train, GPTDataset)
    document = one.train.store.get(7)
    assert document[-1] == 49 and one.train.store.get(7, 2, 5).tolist() == document[2:5].tolist()


def test_a_changed_file_is_tokenised_again(text_file: Path, tmp_path: Path) -> None:
    cfg = config(data_path=(str(text_file),), split="1,0,0")
    before = stream(build(cfg, tmp_path / "cache", valid_samples=0).train)
    text_file.write_text(TEXT[::-1], encoding="utf-8")
    after = stream(build(cfg, tmp_path / "cache", valid_samples=0).train)
    assert after == list(TEXT[::-1].encode()) != before


def test_an_index_is_read_from_the_cache_and_never_stale(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cfg = config(data_path=(write_documents(tmp_path / "a", [list(range(50))] * 9),), split="1,0,0")
    options: dict[str, Any] = {"valid_samples": 0, "tokenizer": NullTokenizer(300)}
    first = order(build(cfg, cache, **options).train)
    folders = sorted((cache / "index").glob("[!.]*"))
    assert order(build(cfg, cache, **options).train) == first
    assert sorted((cache / "index").glob("[!.]*")) == folders
    # Rewritten in place: other lengths are another order, other tokens of the same lengths the same one.
    write_documents(tmp_path / "a", [list(range(100, 150))] * 9)
    assert order(build(cfg, cache, **options).train) == [[t + 100 for t in row] for row in first]
    write_documents(tmp_path / "a", [list(range(40))] * 11)
    changed = build(cfg, cache, **options).train
    assert isinstance(changed, GPTDataset) and changed.tokens_per_epoch == 440
    assert len(list((cache / "index").glob("[!.]*"))) == len(folders) + 1


def test_tokens_of_one_tokenizer_are_not_taken_for_anothers(text_file: Path, tmp_path: Path) -> None:
    for kind in ("ByteTokenizer", "CharTokenizer"):
        cfg = config(data_path=(str(text_file),), split="1,0,0", tokenizer_type=kind)
        tokenizer = build_tokenizer(cfg)
        assert stream(build(cfg, tmp_path / "cache", tokenizer, valid_samples=0).train) == tokenizer.encode(TEXT)


def test_the_cache_tells_apart_all_that_decides_the_order(tmp_path: Path) -> None:
    cfg = config(data_path=(str(tmp_path / "a"),), split="1,0,0")
    variants: list[dict[str, Any]] = [{}, {"seq_length": 15}, {"train_samples": 90}, {"seed": 2}]
    for documents in ([[7] * 50] * 8, [[7] * 40, [7] * 60] * 4):
        write_documents(tmp_path / "a", documents)
        for variant in variants:
            options: dict[str, Any] = {"valid_samples": 0, "tokenizer": NullTokenizer(300), **variant}
            cached, plain = (build(cfg, cache, **options).train for cache in (tmp_path / "cache", None))
            assert isinstance(cached, GPTDataset) and isinstance(plain, GPTDataset)
            assert [cached.cut(k)[1:] for k in range(len(cached))] == [plain.cut(k)[1:] for k in range(len(plain))]


def test_a_damaged_cache_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(data_path=(write_documents(tmp_path / "a", [list(range(50))] * 9),), split="1,0,0")
    options: dict[str, Any] = {"valid_samples": 0, "tokenizer": NullTokenizer(300)}
    first = order(build(cfg, tmp_path / "cache", **options).train)
    (damaged,) = (tmp_path / "cache").glob("index/*/shuffle_index.npy")
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert order(build(cfg, tmp_path / "cache", **options).train) == first
    assert "is damaged" in caplog.text


def test_damaged_tokens_are_made_again(text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(data_path=(str(text_file),), split="1,0,0")
    first = stream(build(cfg, tmp_path / "cache", valid_samples=0).train)
    (damaged,) = (tmp_path / "cache").glob("tokens/*/text_document.bin")
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert stream(build(cfg, tmp_path / "cache", valid_samples=0).train) == first
    assert "cut off" in caplog.text and "tokenising again" in caplog.text


def test_a_longer_run_keeps_its_order_and_appends_epochs(tmp_path: Path) -> None:
    """Rulings 20: no sample of the epochs begun is lost or repeated when a resumed run is given more samples."""
    cfg = config(data_path=(write_documents(tmp_path / "a", [[n] * 20 for n in range(10)]),), split="1,0,0")
    options: dict[str, Any] = {"valid_samples": 0, "tokenizer": NullTokenizer(300), "seq_length": 4}
    short = build(cfg, tmp_path / "c", train_samples=60, **options)
    fresh = build(cfg, tmp_path / "c", train_samples=400, **options)
    longer = build(cfg, tmp_path / "c", train_samples=400, earlier_requests=[short.train_requests], **options)
    assert short.train is not None and longer.train is not None and fresh.train is not None
    known = len(short.train)
    assert short.train_requests == (60,) and longer.train_requests == (60, 400)
    assert order(longer.train, known) == order(short.train) != order(fresh.train, known)
    epoch = 10 * 20 // 4
    assert 400 <= len(longer.train) < 400 + epoch
    twice = build(cfg, tmp_path / "c", train_samples=known + 60, earlier_requests=[(60,)], **options).train
    assert twice is not None and len(twice) == 2 * known
    assert order(twice)[known:] != order(short.train)  # the same epochs again have a shuffle of their own
    tokens = np.bincount(np.array(order(longer.train))[:, :4].ravel(), minlength=10)
    assert tokens.max() - tokens.min() <= 8  # whole epochs: each document as often, up to cut ends
    again = build(cfg, tmp_path / "c", train_samples=60, earlier_requests=[longer.train_requests], **options)
    assert again.train_requests == (60, 400)


def test_a_blend_keeps_its_order_too(tmp_path: Path) -> None:
    paths = [write_documents(tmp_path / name, [[number] * 30] * 8) for number, name in enumerate("ab")]
    cfg = config(data_path=("0.25", paths[0], "0.75", paths[1]), split="1,0,0")
    options: dict[str, Any] = {"valid_samples": 0, "tokenizer": NullTokenizer(300), "seq_length": 4}
    short = build(cfg, tmp_path / "c", train_samples=100, **options)
    longer = build(cfg, tmp_path / "c", train_samples=300, earlier_requests=[short.train_requests], **options)
    assert isinstance(longer.train, BlendedDataset) and len(longer.train) == 300
    assert order(longer.train, 100) == order(short.train, 100)
    assert np.mean(np.array(order(longer.train)) == 1) == pytest.approx(0.75, abs=0.01)


def test_paths_without_weights_count_by_size(tmp_path: Path) -> None:
    paths = (write_documents(tmp_path / "a", [[1] * 41] * 2), write_documents(tmp_path / "b", [[2] * 41] * 6))
    for samples in (40, 500):
        data = build(
            config(data_path=paths, split="1,0,0"),
            tmp_path / "c",
            NullTokenizer(9),
            train_samples=samples,
            valid_samples=0,
            seq_length=4,
        )
        assert data.train is not None and len(data.train) >= samples
        assert np.mean(np.array(order(data.train, samples)) == 2) == pytest.approx(0.75, abs=0.03)


def test_each_split_from_its_own_data_and_words_from_a_file(tmp_path: Path) -> None:
    a, b = (write_documents(tmp_path / name, [[number] * 40]) for number, name in enumerate("ab"))
    own = build(config(train_data_path=(a,), valid_data_path=(b,)), tmp_path / "c", NullTokenizer(300))
    assert set(stream(own.train)) == {0} and set(stream(own.valid)) == {1}
    (tmp_path / "words").write_text(f"0.5 {a}\n0.5 {b}\n")
    words = build(
        config(data_args_path=str(tmp_path / "words"), split="1"), tmp_path / "c", NullTokenizer(300), valid_samples=0
    )
    assert isinstance(words.train, BlendedDataset)


def test_without_a_name_tokens_do_not_say_their_tokenizer(tmp_path: Path) -> None:
    cfg = config(data_path=(write_documents(tmp_path / "a", [[1]]),))
    with pytest.raises(DataError, match="^--tokenizer-type: not given, and token files do not hold the tokenizer"):
        build_tokenizer(cfg)
    assert build_tokenizer(cfg, vocab_size=99).describe() == NullTokenizer(99).describe()


@pytest.mark.parametrize("kind", ["folder", "text file"])
def test_a_prefix_may_also_be_the_name_of_something_else(kind: str, tmp_path: Path) -> None:
    prefix = Path(write_documents(tmp_path / "corpus", [[1, 2, 3] * 20] * 20))
    prefix.mkdir() if kind == "folder" else prefix.write_text("no tokens of this corpus " * 50)
    data = build(config(data_path=(str(prefix),), tokenizer_type="ByteTokenizer"), tmp_path / "cache")
    assert set(stream(data.train)) == {1, 2, 3}


EVALUATE = "do not evaluate, by --eval-iters 0"
MORE = f"give more text or a larger part in --split, or {EVALUATE}"
REPAIR = "repair the line, or tools/preprocess_data.py --skip-bad-lines drops it"
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    (
        {"data_path": ("nothing",)},
        "--data-path=nothing: nothing.idx not found; run tools/preprocess_data.py or name a text file",
    ),
    ({"data_path": ("tokens.bin",)}, "--data-path=tokens.bin: give the prefix, 'tokens'"),
    (
        {"data_path": (".",)},
        "--data-path=.: is a folder; name a text file in it, or the prefix of a .bin/.idx pair",
    ),
    (
        {"data_path": ("latin.txt",)},
        "--data-path=latin.txt: not UTF-8 text (byte 3: 0xe9); convert it, or name a .bin/.idx prefix",
    ),
    (
        {"data_path": ("broken.jsonl",)},
        f"broken.jsonl:2: not valid JSON (Expecting value: line 1 column 10 (char 9)); {REPAIR}",
    ),
    (
        {"data_path": ("other.jsonl",)},
        "other.jsonl:1: no field 'text' (has: content, url); tools/preprocess_data.py takes other fields by "
        "--json-keys",
    ),
    (
        {"data_path": ("text.txt",), "split": "1,0,0"},
        "--split=1,0,0: the valid split is empty (weight 0); give it more, or " + EVALUATE,
    ),
    ({"data_path": ("few.jsonl",)}, f"--data-path=few.jsonl: the valid split is empty (0 tokens); {MORE}"),
    (
        {"data_path": ("text.txt",), "split": "99,1"},
        "--data-path=text.txt: the valid split is too small (94 tokens, one sample of --seq-length=100 needs 101); "
        f"give more text or a larger part in --split, use a shorter --seq-length, or {EVALUATE}",
    ),
    (
        {"data_path": ("empty.txt",)},
        "--data-path=empty.txt: the train split is empty (0 tokens); give more text or a larger part in --split, or "
        "only evaluate by --skip-train",
    ),
    ({"data_path": ("tokens",)}, f"--data-path=tokens: the valid split is empty (0 documents, 0 tokens); {MORE}"),
    ({"data_path": ("text.txt",), "mock_data": True}, "--mock-data: given together with --data-path; drop one"),
    (
        {"data_path": ("text.txt",), "data_args_path": "x"},
        "--data-path: given together with --data-args-path; name the data in one way",
    ),
    (
        {"train_data_path": ("text.txt",)},
        f"--valid-data-path: not given; name data for it, or {EVALUATE}",
    ),
    ({"data_args_path": "x"}, "--data-args-path=x: cannot be read (No such file or directory)"),
]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that opens and cannot be read, of Linux")
def test_a_text_whose_reading_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^--data-path=/proc/self/mem: cannot be read \(Input/output error\)$"):
        build(config(data_path=("/proc/self/mem",)), tmp_path)


@pytest.mark.parametrize(("fields", "message"), BAD_INPUT)
def test_bad_input_is_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT[:9000], encoding="utf-8")
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": }\n')
    Path("other.jsonl").write_text('{"content": "a", "url": "b"}\n')
    Path("few.jsonl").write_text('{"text": "' + "a" * 200 + '"}\n')
    write_documents(Path("tokens"), [[1] * 300])
    with pytest.raises(DataError) as caught:
        build(config(**fields), tmp_path / "cache", ByteTokenizer(), seq_length=100)
    assert str(caught.value) == message


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", [[1] * 300])
    with pytest.raises(DataError, match="a.idx: dtype uint16 cannot hold the 128256 ids of NullTokenizer"):
        build(config(data_path=(prefix,)), tmp_path / "c", NullTokenizer(128256))


def test_a_cache_that_can_not_be_written_is_named(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--data-cache-path=.*cannot be written \(.*\); name another folder"):
        build(config(data_path=(str(text_file),)), tmp_path / "file" / "cache")


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    def build_folder(folder: Path) -> None:
        raise OSError("2494620 requested and 250848 written")  # numpy's words: no errno, no reason

    with pytest.raises(DataError, match="cannot be written .is the disk full. 2494620 requested and 250848 written"):
        cached_folder(tmp_path, "x", build_folder)
