"""Surveys tell two corpora apart, whatever lies where; ids without an embedding are found at the start."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from data_inputs import config, write_documents

from megalite.data import build_datasets, survey
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import HEADER, IndexedDataset
from megalite.data.survey import Survey, survey_differences, surveys_to_meta
from megalite.data.tokenizer import ByteTokenizer, NullTokenizer
from megalite.errors import DataError

DOCUMENTS = [[n, n + 1, *range(n % 5 + 2)] for n in range(40)]


def survey_of(prefix: str) -> Survey:
    return survey.survey(IndexedDataset(prefix), "--data-path")


def rewritten(documents: list[list[int]], kind: str) -> list[list[int]]:
    return {
        "shrunk": documents[:-1],
        "appended": [*documents, [1]],
        "permuted": [documents[5], *documents[1:5], documents[0], *documents[6:]],
        "one id": [*documents[:7], [documents[7][0] + 1, *documents[7][1:]], *documents[8:]],
        "one boundary": [documents[0] + documents[1], *documents[2:]],
    }[kind]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["shrunk", "appended", "permuted", "one id", "one boundary"])
def test_other_data_have_another_survey(
    kind: str, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:  # pieces that still cover everything
        monkeypatch.setattr(survey, "WHOLE", 10)
        monkeypatch.setattr(survey, "PIECE", 8)
    then = survey_of(write_documents(tmp_path / "a", DOCUMENTS))
    same = survey_of(write_documents(tmp_path / "elsewhere" / "b", DOCUMENTS))
    now = survey_of(write_documents(tmp_path / "c", rewritten(DOCUMENTS, kind)))
    assert same.same_as(then) and not now.same_as(then)


def test_layout_and_type_of_the_file_are_no_part_of_it(tmp_path: Path) -> None:
    """Sequences in another order in .bin, 8-byte ids: the same tokens, whole or by pieces."""
    a = IndexedDataset(write_documents(tmp_path / "a", DOCUMENTS))
    lengths, parts, pointers, at = a.lengths, [], np.zeros(len(a), "<i8"), 0
    for sequence in random.Random(3).sample(range(len(a)), len(a)):
        pointers[sequence] = at
        parts.append(np.asarray(a.get(sequence), "<i8"))
        at += parts[-1].nbytes
    (tmp_path / "b.bin").write_bytes(np.concatenate(parts).tobytes())
    head = HEADER.pack(b"MMIDIDX\x00\x00", 1, 5, len(a), len(a) + 1)
    documents = np.arange(len(a) + 1, dtype="<i8")
    (tmp_path / "b.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    b = IndexedDataset(tmp_path / "b")
    assert survey.survey(b, "").same_as(survey.survey(a, ""))
    everything = np.concatenate([a.get(k) for k in range(len(a))])
    for start, stop in ((0, a.num_tokens), (3, 4), (7, 50), (a.num_tokens - 5, a.num_tokens)):
        assert b.stream(start, stop).tolist() == a.stream(start, stop).tolist() == everything[start:stop].tolist()


def test_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "WHOLE", 1000)
    monkeypatch.setattr(survey, "PIECE", 2)
    data = IndexedDataset(write_documents(tmp_path / "a", [[1] * 100_000]))
    pieces = [(start, len(tokens)) for start, tokens in survey._sampled(data)]
    assert pieces[0] == (0, 2) and pieces[-1] == (99_998, 2) and sum(size for _, size in pieces) == 512


def test_differences_are_told_in_numbers() -> None:
    then = Survey("--data-path=a", 1200, 60000, "x", "y")
    now = Survey("--data-path=b", 1000, 50000, "x", "z")
    numbers = "--data-path=b: 1,000 documents of 50,000 tokens (checkpoint 1,200 documents of 60,000 tokens)"
    assert survey_differences(surveys_to_meta({"train": [then]}), {"train": [now]}) == [
        f"{numbers}, there --data-path=a"
    ]
    for lengths, content, what in (("x", "w", "but other tokens"), ("v", "y", "but of other lengths")):
        other = Survey("--data-path=a", 1200, 60000, lengths, content)
        (line,) = survey_differences(surveys_to_meta({"train": [then]}), {"train": [other]})
        assert line == f"--data-path=a: 1,200 documents of 60,000 tokens as in the checkpoint, {what}"
    assert survey_differences(surveys_to_meta({"train": [then]}), {"train": [then], "valid": [now]}) == []
    assert survey_differences({}, {"train": [now]}) == [], "an older checkpoint says nothing"
    assert (
        "2 sources of train data (checkpoint 1)"
        in survey_differences(surveys_to_meta({"train": [then]}), {"train": [then, now]})[0]
    )
    renamed = Survey("--valid-data-path=b", 5, 9, "q", "q")
    assert survey_differences(surveys_to_meta({"valid": [then]}), {"valid": [renamed]}) == [], "told as a changed flag"


ODD = {"train": [{"source": "a", "sequences": None, "tokens": 1, "lengths": "", "content": ""}]}


@pytest.mark.parametrize("meta", [[1], {"train": 3}, {"train": [{"tokens": 1}]}, "x", {"train": [[]]}, 7, ODD])
def test_a_damaged_account_is_one_line(meta: object) -> None:
    with pytest.raises(DataError, match="account of its data is damaged"):
        survey_differences(meta, {"train": [Survey("a", 1, 1, "", "")]})


@pytest.mark.parametrize("whole", [True, False])
def test_ids_without_an_embedding_are_named_at_the_start(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(survey, "WHOLE", 10)
        monkeypatch.setattr(survey, "PIECE", 8)
    prefix = write_documents(tmp_path / "a", [*DOCUMENTS[:30], [1, 2, 290], *DOCUMENTS[30:]])
    with pytest.raises(DataError) as caught:
        build_datasets(
            config(data_path=(prefix,)), seq_length=8, train_samples=1, valid_samples=0, test_samples=0, seed=1,
            tokenizer=ByteTokenizer(), cache_dir=None,
        )  # fmt: skip
    assert str(caught.value) == (
        f"--data-path={prefix}: document 30 holds token id 290, outside of the vocabulary of ByteTokenizer (0..256); "
        "name the tokenizer that wrote it"
    )


def test_megatrons_null_tokenizer_has_one_id_more(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", [[1, 2, 9, 10]] * 9)
    with pytest.raises(DataError, match="with Megatron-LM's NullTokenizer that ends a document: use --vocab-size 11"):
        build_datasets(
            config(data_path=(prefix,)), seq_length=8, train_samples=1, valid_samples=0, test_samples=0, seed=1,
            tokenizer=NullTokenizer(10), cache_dir=None,
        )  # fmt: skip


def test_an_id_that_no_sample_of_the_start_met_is_named_when_it_is_read(tmp_path: Path) -> None:
    data = IndexedDataset(write_documents(tmp_path / "a", [*DOCUMENTS[:30], [1, 2, 290], *DOCUMENTS[30:]]))
    part = GPTDataset(
        data, 0, len(data), seq_length=8, requests=[None], seed=1, vocab_size=257, tokenizer=NullTokenizer(9).kind
    )
    problems = []
    for source in (part, part.sequential()):
        for sample in range(len(source)):
            try:
                source.read(sample, np.empty(9, np.int64))
            except DataError as error:
                problems.append(re.sub(".*/a", "", str(error)))
    assert set(problems) == {
        ": document 30 holds token id 290, outside of the vocabulary of NullTokenizer (0..256); name the tokenizer "
        "that wrote it"
    }
    assert len(problems) >= 2
