"""`.bin/.idx`: every byte of what is written, and files that lie."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from data_inputs import write_documents

from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.errors import DataError

DOCUMENTS = [[5, 6, 7, 8], [1, 2]]


def test_every_byte_follows_the_format(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + bytes([8]) + struct.pack("<QQ", 2, 3)
    expected += struct.pack("<2i", 4, 2) + struct.pack("<2q", 0, 8) + struct.pack("<3q", 0, 1, 2)
    assert Path(prefix + ".idx").read_bytes() == expected and len(expected) == 82
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 1, 2)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", [[70000]], vocab_size=70001)
    assert Path(prefix + ".idx").read_bytes()[17] == 4
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<i", 70000)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = IndexedDataset(write_documents(tmp_path / "a", DOCUMENTS))
    assert len(data) == 2 and data.lengths.tolist() == [4, 2] and data.document_indices.tolist() == [0, 1, 2]
    assert (
        data.get(0).tolist() == [5, 6, 7, 8] and data.get(0, 1, 3).tolist() == [6, 7] and data.get(1, 2).tolist() == []
    )
    with pytest.raises(IndexError):
        data.get(1, 0, 3)


def test_files_of_other_writers_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Modes at the end of the index, sequences out of order and with gaps, documents of several sequences: all
    legal.
    """
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, 3, 3)
    index += struct.pack("<3i", 1, 2, 0) + struct.pack("<3q", 24, 0, 32) + struct.pack("<3q", 0, 2, 3) + b"\0\0\0"
    (tmp_path / "b.idx").write_bytes(index)
    (tmp_path / "b.bin").write_bytes(struct.pack("<4q", 10, 11, 12, 13))
    data = IndexedDataset(tmp_path / "b")
    assert [data.get(i).tolist() for i in range(3)] == [[13], [10, 11], []]
    assert [chunk.tolist() for chunk in data.chunks()] == [[13], [10, 11], []]
    assert caplog.messages == [f"{tmp_path}/b.idx leaves out 8 of the 32 bytes of {tmp_path}/b.bin"]


@pytest.mark.parametrize("extra", [1, 2, 100])
def test_a_bin_that_goes_on_after_its_index_is_refused(extra: int, tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    with open(prefix + ".bin", "ab") as file:
        file.write(bytes(2 * extra))
    with pytest.raises(DataError, match=rf"a.bin: {12 + 2 * extra} bytes, .*a.idx describes 12; is it the index of"):
        IndexedDataset(prefix)


def test_the_index_of_another_corpus_is_refused(tmp_path: Path) -> None:
    a, b = write_documents(tmp_path / "a", DOCUMENTS), write_documents(tmp_path / "b", [[1, 2, 3, 4, 5]])
    os.replace(b + ".idx", a + ".idx")
    with pytest.raises(DataError, match=r"a.bin: 12 bytes, .*a.idx describes 10"):
        IndexedDataset(a)


def test_merging_keeps_documents(tmp_path: Path) -> None:
    a, b = (IndexedDataset(write_documents(tmp_path / name, DOCUMENTS)) for name in "ab")
    with IndexedWriter(tmp_path / "c", dtype=a.dtype) as writer:
        writer.append(a)
        writer.append(b)
    merged = IndexedDataset(tmp_path / "c")
    assert merged.lengths.tolist() == [4, 2, 4, 2] and merged.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert merged.get(3).tolist() == [1, 2]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document([1])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_pair_is_told_and_never_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    assert not caplog.records
    write_documents(tmp_path / "a", [[9]])
    assert caplog.messages == [f"{prefix}.bin and .idx were there already; they are replaced"]
    assert IndexedDataset(prefix).get(0).tolist() == [9]

    replace = os.replace

    def killed_before_the_index(source: str, target: str | Path) -> None:
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed_before_the_index)
    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path / "a", DOCUMENTS)
    with pytest.raises(DataError, match="idx"):
        IndexedDataset(prefix)


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="dtype uint16 cannot hold id 65536"),
        IndexedWriter(tmp_path / "a", vocab_size=9) as w,
    ):
        w.add_document([65536])


def test_missing_and_misnamed_files_are_one_line(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    with pytest.raises(DataError, match=r"a.bin: give the prefix, '.*/a'$"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(DataError, match=r"--data-path=.*/no: .*no.idx not found; run tools/preprocess_data.py"):
        IndexedDataset(tmp_path / "no")
    Path(prefix + ".bin").unlink()
    with pytest.raises(DataError, match=r"a.bin not found"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"PK\x03\x04", r"a.idx: not a megalite/Megatron index \(magic 504b0304: a zip\?\)"),
        (9, struct.pack("<Q", 2), "index version 2, this megalite reads 1"),
        (17, b"\x06", "dtype code 6 is floating point"),
        (17, b"\x63", "dtype code 99 is unknown"),
        (18, struct.pack("<Q", 2**62), "need .* bytes, the file has 82"),
        (26, struct.pack("<Q", 4), "need 90 bytes, the file has 82"),
        (34, struct.pack("<i", -4), "sequence 0 has a negative length"),
        (34, struct.pack("<i", 7), r"a.bin: cut off \(12 bytes, the index says 14; first missing: sequence 0\)"),
        (42, struct.pack("<q", -8), "a sequence begins outside"),
        (42, struct.pack("<q", 2**63 - 2), "a sequence begins outside"),
        (42, struct.pack("<q", 1), "a sequence begins outside"),
        (58, struct.pack("<q", 1), "document boundaries must rise"),
        (66, struct.pack("<q", 9), "document boundaries must rise"),
        (34, struct.pack("<2i", 0, 0), "a.bin: 0 tokens"),
        (34, struct.pack("<2i", 4, 1), r"a.bin: 12 bytes, .*a.idx describes 10; is it the index of another corpus"),
        (42, struct.pack("<2q", 0, 6), r"a.idx: damaged \(sequences 0 and 1 overlap at byte 6 of .*a.bin\)"),
    ],
)
def test_a_damaged_index_is_named(place: int, value: bytes, message: str, tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    raw = bytearray(Path(prefix + ".idx").read_bytes())
    raw[place : place + len(value)] = value
    Path(prefix + ".idx").write_bytes(raw)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "content"), [(".bin", b""), (".idx", b""), (".idx", b"MMIDIDX\0\0"), (".bin", b"\0" * 11)]
)
def test_cut_files_are_named(suffix: str, content: bytes, tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", DOCUMENTS)
    Path(prefix + suffix).write_bytes(content)
    with pytest.raises(DataError, match="a" + suffix):
        IndexedDataset(prefix)


def test_random_damage_never_reads_outside_of_the_file(tmp_path: Path) -> None:
    """1,000 changed or cut indices: either a DataError or sequences that lie within the file."""
    prefix = write_documents(tmp_path / "a", [list(range(n)) for n in range(1, 9)])
    good = Path(prefix + ".idx").read_bytes()
    draw = random.Random(7)
    refused = 0
    for _ in range(1000):
        raw = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 8])):
            raw[draw.randrange(len(raw))] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        if draw.random() < 0.2:
            raw = raw[: draw.randrange(len(raw))]
        Path(prefix + ".idx").write_bytes(raw)
        try:
            data = IndexedDataset(prefix)
        except DataError:
            refused += 1
            continue
        for sequence in range(len(data)):
            assert data.get(sequence).size == data.lengths[sequence]
    assert refused > 500


def test_the_writer_of_megatron_agrees(tmp_path: Path) -> None:
    """The size that the format's description gives: 34 + 12 N + 8 D."""
    prefix = write_documents(tmp_path / "a", [[1]] * 5)
    assert Path(prefix + ".idx").stat().st_size == 34 + 12 * 5 + 8 * 6
    assert np.memmap(prefix + ".bin", np.uint16).tolist() == [1] * 5
