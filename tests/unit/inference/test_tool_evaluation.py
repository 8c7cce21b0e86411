"""Scores of a loaded checkpoint against plain cross entropy, window by window."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.convert import CheckpointSource, write_huggingface
from megalite.data.indexed import ANSWER, END, IndexedWriter
from megalite.data.tokenizer import CharTokenizer
from megalite.errors import CheckpointError, ConfigError, DataError
from megalite.inference.evaluation import how_scored, open_data_path, score_source, score_text
from megalite.inference.loaded_model import LoadedModel, load_for_inference
from megalite.inference.tasks import detokenize_wikitext, last_word_accuracy, score_continuations
from tests.unit.inference.tiny_checkpoint import TEXT, all_logits, tiny_model_config, write_checkpoint
from tools.evaluate import changed_by, evaluate, manner, of_split, parse, seen_in_training

LONG = 16  # the model's sequence length


def _naive_losses(stack: torch.nn.Module, ids: list[int], *, overlap: int = 0) -> list[float]:
    """Loss of each label in windows of LONG inputs that share `overlap` of them; a label counts where it is new."""
    losses: list[float] = []
    start = 0
    while len(losses) < len(ids) - 1:
        window = ids[start : start + LONG + 1]
        log_probabilities = all_logits(stack, window[:-1]).log_softmax(-1)  # type: ignore[arg-type]
        every = [-float(log_probabilities[i, label]) for i, label in enumerate(window[1:])]
        losses += every[overlap if start else 0 :]
        start += LONG - overlap
    return losses


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[LoadedModel, torch.nn.Module]:
    _, stack = write_checkpoint(tmp_path)
    return load_for_inference(tmp_path, device="cpu"), stack


def test_weights_come_back_bit_for_bit_and_without_gradients(loaded: tuple) -> None:
    model, stack = loaded
    assert model.iteration == 7 and model.consumed_samples == 14
    for (name, found), (_, saved) in zip(model.model.logical_parameters(), stack.logical_parameters(), strict=True):
        rows = 257 if name.startswith("embedding.word") else None
        assert torch.equal(found[:rows], saved[:rows]), name
        assert not found.requires_grad
    assert not model.model.training


@pytest.mark.parametrize("overlap", [0, 1, 9, 15])
@pytest.mark.parametrize("length", [2, 16, 17, 18, 100])
def test_text_windows(loaded: tuple, overlap: int, length: int) -> None:
    model, stack = loaded
    text = TEXT[:length].encode().decode("ascii", "ignore")
    losses = _naive_losses(stack, list(text.encode()), overlap=overlap)
    score = score_text(model, text, overlap=overlap, micro_batch_size=3)
    assert score.num_tokens == score.num_bytes == len(text) - 1
    assert score.loss_sum == pytest.approx(math.fsum(losses), rel=1e-12)


def test_record_of_a_text_beyond_ascii(loaded: tuple) -> None:
    model, stack = loaded
    losses = _naive_losses(stack, list(TEXT.encode()))
    record = score_text(model, TEXT).record()
    assert record["loss"] == pytest.approx(math.fsum(losses) / len(losses))
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2)), "one token is one byte here"
    assert record["word_ppl"] == pytest.approx(math.exp(math.fsum(losses) / len(TEXT.split())))
    assert record["num_bytes"] == len(TEXT.encode()) - 1


def test_bytes_of_characters(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("".join(sorted(set(TEXT))))
    write_checkpoint(tmp_path, tokenizer=tokenizer)
    model = load_for_inference(tmp_path, device="cpu")
    assert isinstance(model.tokenizer, CharTokenizer)
    score = score_text(model, TEXT)
    assert score.num_tokens == len(TEXT) - 1
    assert score.num_bytes == len(TEXT.encode()) - 1


@pytest.mark.parametrize("of_run", [{}, {"validation_set_names": ("a", "b"), "loss_by_part": True}])
def test_data_path_whole_and_split(of_run: dict, loaded: tuple, tmp_path: Path) -> None:
    """of_run: what the run that saved the model was told of its own data."""
    model, stack = loaded
    model = replace(model, config=replace(model.config, data=replace(model.config.data, **of_run)))
    documents = [list(TEXT[a:b].encode()) + [256] for a, b in ((0, 40), (40, 70), (70, 100), (100, 150))]
    with IndexedWriter(tmp_path / "corpus", vocab_size=257) as writer:
        for document in documents:
            writer.add_document(np.array(document))

    def score(split: str | None) -> float:
        source = open_data_path(model, str(tmp_path / "corpus"), split=split, cache_path=str(tmp_path / "cache"))
        return score_source(model, source, micro_batch_size=2).loss_sum

    def naive(parts: list[list[int]]) -> float:
        return math.fsum(_naive_losses(stack, [token for part in parts for token in part]))

    assert score(None) == pytest.approx(naive(documents), rel=1e-12)
    assert score("train") == pytest.approx(naive(documents[:2]), rel=1e-12)  # saved with --split 50,50,0
    assert score("valid") == pytest.approx(naive(documents[2:]), rel=1e-12)
    assert score("25,75,0") == pytest.approx(naive(documents[1:]), rel=1e-12)
    with pytest.raises(DataError, match="--split=test"):
        score("test")


ROPE = tiny_model_config(position_embedding_type="rope")


def write_talks(prefix: Path, lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Documents of bytes with marks: the second half of each is an answer."""
    talks, at = [], 0
    writers = IndexedWriter(prefix, vocab_size=257, marked=True), IndexedWriter(f"{prefix}_marks", dtype=np.uint8)
    for length in lengths:
        ids = list((TEXT * 4)[at : at + length].encode("ascii", "replace"))
        marks = [ANSWER * (place >= length // 2) for place in range(length)]
        marks[-1] |= END
        for writer, row in zip(writers, (ids, marks), strict=True):
            writer.add_document(np.array(row))
        talks, at = [*talks, (ids, marks)], at + length
    for writer in writers:
        writer.close()
    return talks


@pytest.mark.parametrize("reset", [False, True], ids=["as pretrained", "reset-attention-mask"])
@pytest.mark.parametrize("window", [16, 32, 128])
def test_conversations_are_scored_each_apart(window: int, reset: bool, tmp_path: Path) -> None:
    """Whatever the run was told and however long its samples are, as long as no conversation is longer."""
    talks = write_talks(tmp_path / "talks", [11, 30, 2, 17, 5])
    _, stack = write_checkpoint(tmp_path, model=replace(ROPE, seq_length=window))
    model = load_for_inference(tmp_path, device="cpu")
    data = replace(model.config.data, reset_attention_mask=reset, reset_position_ids=reset, eod_mask_loss=reset)
    model = replace(model, config=replace(model.config, data=data))
    expected = []
    for ids, marks in talks:
        for start in range(0, len(ids) - 1, window):
            part, counted = ids[start : start + window + 1], marks[start + 1 : start + window + 1]
            losses = all_logits(stack, part[:-1]).log_softmax(-1)
            expected += [-float(losses[i, part[i + 1]]) for i, mark in enumerate(counted) if mark & ANSWER]
    source = open_data_path(model, str(tmp_path / "talks"), split=None)
    for size in (1, 3, None):
        score = score_source(model, source, micro_batch_size=size)
        assert score.num_tokens == len(expected)
        assert score.loss_sum == pytest.approx(math.fsum(expected), rel=1e-12)
    how = how_scored(model, source)
    assert how == {"window": window, "apart": True, "num_conversations": 5, "cut": int(window == 16)}
    assert "5 conversations, each apart from the others, in windows of" in manner(how)
    assert ("1 are longer and cut" in manner(how)) == (window == 16)


def test_the_manner_of_text_is_said(loaded: tuple, tmp_path: Path) -> None:
    model, _ = loaded
    write_text = tmp_path / "text.txt"
    write_text.write_text(TEXT, encoding="utf-8")
    source = open_data_path(model, str(write_text), split=None, cache_path=str(tmp_path / "cache"))
    assert manner(how_scored(model, source)) == "in windows of 16 tokens, documents of a window see each other"
    assert manner(how_scored(model, None)) == "in windows of 16 tokens"
    apart = replace(model.config.data, reset_attention_mask=True)
    model = replace(model, config=replace(model.config, data=apart))
    assert manner(how_scored(model, source)) == "in windows of 16 tokens, documents apart"


def test_a_run_and_its_export_score_the_same_by_the_same_flags(tmp_path: Path) -> None:
    """Whatever both were: the run has windows of 16 and documents apart, the folder windows of 64 and neither."""
    _, stack = write_checkpoint(tmp_path / "run", model=replace(ROPE, max_position_embeddings=64))
    folder = write_huggingface(CheckpointSource(tmp_path / "run"), tmp_path / "model")
    documents = [[*TEXT.encode()[at : at + length], 256] for at, length in ((0, 21), (30, 9), (44, 33), (3, 14))]
    with IndexedWriter(tmp_path / "text", vocab_size=257) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    flags = ["--seq-length", "24", "--reset-attention-mask", "--no-reset-position-ids", "--eod-mask-loss"]

    def scored(where: Path, *more: str) -> Any:
        asked = parse(["--load", str(where), "--data-path", str(tmp_path / "text"), *more])
        return evaluate(load_for_inference(asked.load, device="cpu", changed=changed_by(asked)), asked)

    one, other = scored(tmp_path / "run", *flags), scored(folder, *flags)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6) and one["num_tokens"] == other["num_tokens"]
    joined = [token for document in documents for token in document]
    expected = []
    for start in range(0, len(joined) - 1, 24):
        window = joined[start : start + 25]
        for at, (token, label) in enumerate(zip(window, window[1:], strict=False)):
            begin = max((place + 1 for place in range(at) if window[place] == 256), default=0)
            if token != 256:
                row = all_logits(stack, window[begin : at + 1])[-1].log_softmax(-1)
                expected.append(-float(row[label]))
    assert one["loss"] == pytest.approx(math.fsum(expected) / len(expected), rel=1e-9)
    assert manner(one) == "in windows of 24 tokens, documents apart, no loss behind the end of one"
    assert scored(folder)["window"] == 64 and scored(folder)["loss"] != pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--text-file", "a", "--no-eod-mask-loss"], "--no-eod-mask-loss: belongs to --data-path; drop it"),
        (["--data-path", "a", "--seq-length", "0"], "--seq-length=0: must be"),
        (["--data-path", "talks", "--reset-attention-mask"], "--reset-attention-mask: conversations are scored each"),
        (["--data-path", "talks", "--seq-length", "17"], "--seq-length=17: the model has 16 learned positions"),
    ],
)
def test_flags_that_do_nothing_or_cannot_be(
    flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path)
    write_talks(tmp_path / "talks", [11, 30])
    with pytest.raises(ConfigError, match=f"^{says}"):
        asked = parse(["--load", str(tmp_path), *flags])
        evaluate(load_for_inference(asked.load, device="cpu", changed=changed_by(asked)), asked)


def test_texts_of_jsonl_are_scored_and_not_its_syntax(loaded: tuple, tmp_path: Path) -> None:
    model, stack = loaded
    texts, end = ['said "no"\n' + "x" * 9, "another text"], model.tokenizer.eod_id
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ids = [number for text in texts for number in [*text.encode(), end]]
    flags = ["--text-file", str(tmp_path / "a.jsonl"), "--data-cache-path", str(tmp_path / "cache")]
    record = evaluate(model, parse(["--load", "a", *flags]))
    losses = _naive_losses(stack, ids)
    assert record["num_tokens"] == len(losses) == len(ids) - 1
    assert record["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
    for more in (["--overlap", "3"], ["--task", "wikitext"]):
        with pytest.raises(ConfigError, match="running text"):
            parse(["--load", "a", *flags, *more])


def test_an_error_names_the_flag_that_was_given(loaded: tuple) -> None:
    with pytest.raises(DataError, match="^--data-path=gone: "):
        open_data_path(loaded[0], "gone", split=None)


def test_the_split_is_said(loaded: tuple) -> None:
    model, _ = loaded
    default = " (default; give --split A,B,C, whose second part is scored)"

    def said(asked: str | None, **data: Any) -> str:
        changed = replace(model, config=replace(model.config, data=replace(model.config.data, **data)))
        return of_split(how_scored(changed, None, asked))

    assert said(None) == ""
    for part in ("train", "valid", "test"):
        assert said(part) == f"; part {part} of split 50,50,0"  # the run's own
        assert said(part, split="969,30,1") == f"; part {part} of split 969,30,1{default}"  # of a Hugging Face folder
        assert said(part, split="969,30,1", data_path=("a",)) == f"; part {part} of split 969,30,1"
        assert said(part, split="969,30,1", train_data_path=("a",)).endswith(default)
    assert said("25,75,0", split="969,30,1") == "; part valid of split 25,75,0"


def test_data_path_may_be_text(loaded: tuple, tmp_path: Path) -> None:
    model, _ = loaded
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    source = open_data_path(model, str(file), split=None, cache_path=str(tmp_path / "cache"))
    assert score_source(model, source).loss_sum == pytest.approx(score_text(model, TEXT).loss_sum, rel=1e-12)


def test_continuations_and_last_words(loaded: tuple) -> None:
    model, stack = loaded
    pairs = [([72, 105], [33]), ([1, 2, 3], [4, 5, 6]), (list(range(20)), [7, 8])]
    for (context, continuation), found in zip(pairs, score_continuations(model, pairs), strict=True):
        ids = [*context, *continuation][-17:]
        log_probabilities = all_logits(stack, ids[:-1]).log_softmax(-1)
        rows = range(len(ids) - 1 - len(continuation), len(ids) - 1)
        expected = sum(float(log_probabilities[row, ids[row + 1]]) for row in rows)
        assert found.log_likelihood == pytest.approx(expected, rel=1e-12)
        assert not found.is_greedy
    best = int(all_logits(stack, list(b"ab"))[-1].argmax())
    (greedy,) = score_continuations(model, [(list(b"ab"), [best])])
    assert greedy.is_greedy


def test_last_word_accuracy_counts_whole_words(loaded: tuple) -> None:
    model, _ = loaded
    record = last_word_accuracy(model, ["once upon a time", "word", "x y"])
    assert record["num_passages"] == 2 and record["accuracy"] == 0.0
    (pair,) = score_continuations(model, [(list(b"x"), list(b" y"))])
    (other,) = score_continuations(model, [(list(b"once upon a"), list(b" time"))])
    total = pair.log_likelihood + other.log_likelihood
    assert record["last_word_ppl"] == pytest.approx(math.exp(-total / 2))


def test_a_text_of_the_training_is_said_to_be_one(
    loaded: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("story.txt", "other.txt"):
        (tmp_path / name).write_text(TEXT)
    data, config = loaded[0].config.data, loaded[0].config
    config = replace(config, data=replace(data, data_path=("0.5", "story.txt"), mock_data=False))
    said = {
        name: seen_in_training(parse(["--load", "run", *flags]), config)
        for name, flags in {
            "text": ["--text-file", str(tmp_path / "story.txt")],
            "whole": ["--data-path", "story.txt"],
            "held out": ["--data-path", "story.txt", "--split", "valid"],
            "other": ["--text-file", "other.txt"],
        }.items()
    }
    assert said["held out"] is None and said["other"] is None
    assert str(said["text"]).startswith(f"{tmp_path}/story.txt: this model was trained on it")
    assert str(said["whole"]).endswith("; --data-path story.txt --split valid scores what was held out")


def test_wikitext_spacing_is_undone() -> None:
    spaced = ' = = A title = = \n It \'s 1 @,@ 234 @.@ 5 m ( 9 ft ) long , the " big " one : 5 – 6 well @-@ known . \n'
    assert detokenize_wikitext(spaced) == (
        ' == A title == \n It\'s 1,234.5 m (9 ft) long, the "big" one: 5–6 well-known. \n'
    )


def test_errors(loaded: tuple, tmp_path: Path) -> None:
    model, _ = loaded
    with pytest.raises(DataError, match="1 tokens, at least 2"):
        score_text(model, "a")
    with pytest.raises(ConfigError, match=r"--overlap=16: must be between 0 and --seq-length - 1 = 15"):
        score_text(model, TEXT, overlap=16)
    with pytest.raises(DataError, match="cannot be scored"):
        list(score_continuations(model, [([], [1])]))
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        (tmp_path / "empty").mkdir()
        load_for_inference(tmp_path / "empty")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device=cuda: torch sees no GPU"):
            load_for_inference(tmp_path, device="cuda")


def test_a_llama_checkpoint_loads(tmp_path: Path) -> None:
    changes = {"position_embedding_type": "rope", "activation": "swiglu", "untie_embeddings_and_output_weights": True}
    _, stack = write_checkpoint(tmp_path, model=tiny_model_config(**changes))
    model = load_for_inference(tmp_path / "iter_0000007")
    expected = math.fsum(_naive_losses(stack, list(b"some text")))
    assert score_text(model, "some text").loss_sum == pytest.approx(expected, rel=1e-12)
