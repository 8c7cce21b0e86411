"""From text files to token files: every format, any number of workers, the tools as users call them."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import preprocess_data
from megalite.data import file_chunks as units
from megalite.data.file_chunks import text_pieces
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.preprocess import preprocess
from megalite.data.tokenizer import ByteTokenizer, CharTokenizer
from megalite.errors import DataError
from tokenizer_training import train_bpe

TOOLS = Path(__file__).resolve().parents[3] / "tools"
TEXTS = [f"Document {n}: naïve\n  lines and 'quotes'.\n\nMore {n * n}.\n" * (n % 7 + 1) for n in range(60)]


def documents(prefix: str) -> list[bytes]:
    data = IndexedDataset(prefix)
    return [bytes(t for t in data.get(i) if t < 256) for i in range(len(data))]


def jsonl(path: Path) -> str:
    path.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return str(path)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_writes_the_same_bytes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 700)
    source = jsonl(tmp_path / "a.jsonl")
    tokenizer = train_bpe(TEXTS, 300)
    summary = preprocess([source, source], str(tmp_path / "out"), tokenizer, append_eod=True, workers=workers)
    assert summary.prefixes == (str(tmp_path / "out_text_document"),)
    data = IndexedDataset(summary.prefixes[0])
    assert len(data) == summary.documents == 2 * len(TEXTS)
    for number, text in enumerate(TEXTS + TEXTS):
        assert data.get(number).tolist() == [*tokenizer.encode(text), tokenizer.eod_id]
    assert summary.done == summary.size == 2 * Path(source).stat().st_size
    assert summary.text_bytes == 2 * sum(len(text.encode()) for text in TEXTS)


def test_empty_documents_are_written_as_megatron_does(tmp_path: Path) -> None:
    """A document without a sequence: its boundary appears twice. The sequences, and so the samples, are the same."""
    texts = ["", "ab", "", "", "c", ""]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (prefix,) = preprocess([str(source)], str(tmp_path / "out"), ByteTokenizer(), append_eod=True).prefixes
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 7) + struct.pack("<2i", 3, 2)
    index += struct.pack("<2q", 0, 6) + struct.pack("<7q", 0, 0, 1, 1, 1, 2, 2)
    assert Path(prefix + ".idx").read_bytes() == index
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<5H", 97, 98, 256, 99, 256)
    data = IndexedDataset(prefix)
    assert [data.document_of(k) for k in range(2)] == [1, 4]
    with IndexedWriter(tmp_path / "twice", dtype=data.dtype) as writer:
        writer.append(data)
        writer.append(data)
    assert IndexedDataset(tmp_path / "twice").document_indices.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl")
    raw = Path(plain).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    inputs = [plain, str(tmp_path / "a.jsonl.gz")]
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(raw))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": ["x"] * len(TEXTS), "text": TEXTS}), tmp_path / "a.parquet")
    inputs += [str(tmp_path / "a.jsonl.zst"), str(tmp_path / "a.parquet")]
    for number, source in enumerate(inputs):
        prefix = preprocess([source], str(tmp_path / f"out{number}"), ByteTokenizer()).prefixes[0]
        assert documents(prefix) == [text.encode() for text in TEXTS], source


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    prefix = preprocess([str(tmp_path / "saved")], str(tmp_path / "out"), ByteTokenizer()).prefixes[0]
    assert documents(prefix) == [text.encode() for text in TEXTS]


def test_a_text_file_is_one_document_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 400)
    text = "".join(TEXTS)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for number, tokenizer in enumerate([ByteTokenizer(), CharTokenizer.from_texts([text]), train_bpe(TEXTS, 300)]):
        eod = tokenizer.eod_id is not None
        prefix = preprocess(
            [str(tmp_path / "a.txt")] * 2, str(tmp_path / f"o{number}"), tokenizer, append_eod=eod, workers=2
        ).prefixes[0]
        data = IndexedDataset(prefix)
        assert len(data) == 2
        assert data.get(1).tolist() == tokenizer.encode(text) + [tokenizer.eod_id] * eod


def test_units_and_answers_that_fill_a_pipe_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """In a process of its own, which is given up: a worker that has two of them would hang."""
    (tmp_path / "a.txt").write_text("some words of a line\n" * 200_000)
    argv = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", "a.txt", "--output-prefix", "o", "--workers"]
    subprocess.run([*argv, "2"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert IndexedDataset(tmp_path / "o_text_document").num_tokens == (tmp_path / "a.txt").stat().st_size


def test_pieces_are_cut_between_words_of_two_lines() -> None:
    text = "a\nb\n\nc \nd\n e\nf" * 30
    pieces = list(text_pieces(text, 10))
    assert "".join(pieces) == text and len(pieces) > 10
    for piece, following in zip(pieces[:-1], pieces[1:], strict=True):
        assert piece.endswith("\n") and not piece[-2].isspace() and not following[0].isspace()


def test_several_fields_give_several_outputs(tmp_path: Path) -> None:
    summary = preprocess(
        [jsonl(tmp_path / "a.jsonl")], str(tmp_path / "out"), ByteTokenizer(), json_keys=("id", "text")
    )
    assert [Path(p).name for p in summary.prefixes] == ["out_id_document", "out_text_document"]
    assert documents(summary.prefixes[0])[7] == b"7" and documents(summary.prefixes[1])[7] == TEXTS[7].encode()


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_lines_are_named_or_left_out(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 50)
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "fine"}'] * 30
    lines[12], lines[20], lines[25] = "", "{'text'}", '{"text": 3}'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"^\S*a.jsonl:21: not valid JSON"):
        preprocess([str(path)], str(tmp_path / "out"), ByteTokenizer(), workers=workers)
    assert not list(tmp_path.glob("out*.bin")), "what was done is kept, but not under its name"
    summary = preprocess([str(path)], str(tmp_path / "out"), ByteTokenizer(), workers=workers, skip_bad_lines=True)
    assert (summary.skipped, summary.documents) == (2, 27)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    for name, message in [
        ("no.jsonl", "--input=.*no.jsonl: no such file"),
        ("empty.jsonl", "0 tokens for .*out_text_document"),
        ("a.jsonl.gz", "cannot be unpacked"),
        ("a.parquet", "not a parquet file"),
        ("latin.txt", "not UTF-8 text"),
        (".", "is a folder without a saved data set"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            preprocess([str(tmp_path / name)], str(tmp_path / "out"), ByteTokenizer())
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="--append-eod: CharTokenizer has no end-of-document token"):
        preprocess(["x"], str(tmp_path / "out"), CharTokenizer("ab"), append_eod=True)


def test_the_tools_as_users_call_them(tmp_path: Path) -> None:
    def run(tool: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(TOOLS / tool), *flags], cwd=tmp_path, capture_output=True, text=True)

    jsonl(tmp_path / "a.jsonl")
    trained = run("train_tokenizer.py", "--input", "a.jsonl", "--vocab-size", "300", "--output", "tok")
    assert trained.returncode == 0, trained.stderr
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tok", "--append-eod", "--workers", "2"]
    made = run("preprocess_data.py", "--input", "a.jsonl", "--output-prefix", "d/a", *flags)
    assert made.returncode == 0, made.stderr
    assert "B/s of text" in made.stdout and "train with --data-path d/a_text_document" in made.stdout
    merged = run("merge_datasets.py", "--input", "d", "--output-prefix", "d/all")
    assert merged.returncode == 0, merged.stderr
    assert len(IndexedDataset(tmp_path / "d" / "all")) == len(TEXTS)
    bad = run("preprocess_data.py", "--input", "no.jsonl", "--output-prefix", "b")
    assert (bad.returncode, bad.stdout.count("\n"), bad.stderr) == (2, 1, "error: --input=no.jsonl: no such file\n")


def test_a_vocabulary_that_the_tokenizer_does_not_take_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--input", jsonl(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    for size, told in ((5000, True), (257, False)):  # ByteTokenizer's own: 256 bytes and the end of a document
        preprocess_data.main([*argv, "--vocab-size", str(size)])
        note = f"note: --vocab-size={size}: no effect with ByteTokenizer, which has 257 ids; "
        assert (note in capsys.readouterr().out) == told
    with pytest.raises(DataError, match="--vocab-size=50: ByteTokenizer has 257 tokens, more than that"):
        preprocess_data.main([*argv, "--vocab-size", "50"])
