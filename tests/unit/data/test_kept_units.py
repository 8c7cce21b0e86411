"""A killed `preprocess` leaves its work to the next one, which writes the bytes of one that nobody killed."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.data import file_chunks
from megalite.data.kept_units import KeptUnits
from megalite.data.preprocess import preprocess
from megalite.data.tokenizer import ByteTokenizer
from megalite.errors import DataError

TEXTS = [f"Document {n}: naïve\nline.\n" * (n % 5) for n in range(40)]
NAMES = [f"out_{key}_document{suffix}" for key in ("text", "id") for suffix in (".bin", ".idx")]


class Killed(BaseException):
    pass


class Mortal(ByteTokenizer):
    """Counts its batches; at the `deadly`-th it copies the folder as a kill would leave it, and raises."""

    def __init__(self, folder: Path, deadly: int = -1) -> None:
        super().__init__()
        self.folder, self.deadly, self.batches = folder, deadly, 0

    def encode_batch(self, texts):  # type: ignore[no-untyped-def]
        self.batches += 1
        if self.batches == self.deadly:
            shutil.copytree(self.folder, self.folder.with_name("killed"))
            raise Killed
        return super().encode_batch(texts)


def inputs(folder: Path, texts: list[str] = TEXTS) -> list[str]:
    lines = "".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl.gz")]


def run(folder: Path, tokenizer: ByteTokenizer, texts: list[str] = TEXTS, **options: Any) -> dict[str, bytes]:
    keys = options.pop("json_keys", ("text", "id"))
    preprocess(inputs(folder, texts), str(folder / "out"), tokenizer, json_keys=keys, **options)
    assert not list(folder.glob("*.partial"))
    return {name: (folder / name).read_bytes() for name in NAMES}


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the work of a run that was killed in its second file."""
    monkeypatch.setattr(file_chunks, "UNIT_BYTES", 500)
    (tmp_path / "one").mkdir()
    with pytest.raises(Killed):
        run(tmp_path / "one", Mortal(tmp_path / "one", 19))
    return tmp_path / "killed"


def fresh(folder: Path, tokenizer: ByteTokenizer, texts: list[str] = TEXTS, **options: Any) -> dict[str, bytes]:
    (folder / "fresh").mkdir()
    return run(folder / "fresh", tokenizer, texts, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_next_goes_on_and_writes_the_same_bytes(killed: Path, workers: int) -> None:
    whole, rest = Mortal(killed), Mortal(killed)
    expected = fresh(killed, whole)
    assert run(killed, rest, workers=workers) == expected
    if workers == 1:
        assert 0 < rest.batches == whole.batches - 18, "what was done is not done again"


def _torn(folder: Path) -> None:
    path = folder / "out_text_document.bin.partial"
    path.write_bytes(path.read_bytes()[:-3])


def _flipped(folder: Path) -> None:
    path = folder / "out_id_document.bin.partial"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def _torn_line(folder: Path) -> None:
    path = folder / "out_text_document.partial"
    path.write_bytes(path.read_bytes()[:-9])


def _foreign_lengths(folder: Path) -> None:
    path = folder / "out_text_document.partial"
    first, second, *rest = path.read_text().split("\n")
    path.write_text("\n".join([first, second.replace("[[0, ", "[[123456789123456789, "), *rest]))


def _surplus(folder: Path) -> None:
    with open(folder / "out_text_document.bin.partial", "ab") as file:
        file.write(b"surplus!" * 99)


def _alone(folder: Path) -> None:
    (folder / "out_text_document.partial").unlink()


@pytest.mark.parametrize("damage", [_torn, _flipped, _torn_line, _foreign_lengths, _surplus, _alone])
def test_what_is_damaged_is_done_again(killed: Path, damage: Callable[[Path], None]) -> None:
    damage(killed)
    assert run(killed, ByteTokenizer()) == fresh(killed, ByteTokenizer())


def test_another_text_or_other_settings_never_use_it(killed: Path) -> None:
    (killed.parent / "more").mkdir()
    folders = [shutil.copytree(killed, killed.parent / f"more/{n}") for n in range(3)]
    changed = [*TEXTS[:7], TEXTS[7].replace("7", "8"), *TEXTS[8:]]  # as long as it was
    assert run(folders[0], ByteTokenizer(), changed) == fresh(folders[0], ByteTokenizer(), changed)
    assert run(folders[1], ByteTokenizer(), append_eod=True) == fresh(folders[1], ByteTokenizer(), append_eod=True)
    keys = ("id", "text")
    assert run(folders[2], ByteTokenizer(), json_keys=keys) == fresh(folders[2], ByteTokenizer(), json_keys=keys)


def test_broken_lines_are_left_out_only_where_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_chunks, "UNIT_BYTES", 50)
    path, out = tmp_path / "a.jsonl", str(tmp_path / "out")
    path.write_text('{"text": "fine"}\n' * 9 + "{broken\n" + '{"text": "fine"}\n' * 99)
    with pytest.raises(DataError, match=r"a.jsonl:10: not valid JSON"):
        preprocess([str(path)], out, ByteTokenizer())
    assert preprocess([str(path)], out, ByteTokenizer(), skip_bad_lines=True).documents == 108
    (tmp_path / "one").mkdir()
    with pytest.raises(Killed):
        preprocess([str(path)], out, Mortal(tmp_path / "one", 12), skip_bad_lines=True)
    with pytest.raises(DataError, match=r"a.jsonl:10: not valid JSON"):
        preprocess([str(path)], out, ByteTokenizer())


def test_two_at_once_are_refused(killed: Path) -> None:
    with (
        KeptUnits([str(killed / "out_id_document")], "", skip_bad_lines=False),
        pytest.raises(DataError, match="another process writes .*out_id_document.bin; wait for it"),
    ):
        run(killed, ByteTokenizer())


def test_a_full_disk_is_one_line_and_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: of files that may not grow."""
    monkeypatch.setattr(file_chunks, "UNIT_BYTES", 500)
    expected = fresh(tmp_path, ByteTokenizer())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    inputs(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limit[1]))
        with pytest.raises(DataError, match=r"out_text_document.bin: cannot be written \(File too large\); make room"):
            preprocess(
                [str(tmp_path / "a.jsonl")] * 2, str(tmp_path / "out"), ByteTokenizer(), json_keys=("text", "id")
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "out_text_document.bin.partial").stat().st_size > 1000
    assert run(tmp_path, ByteTokenizer()) == expected
