"""Texts of a Hugging Face folder begin with the special tokens that transformers puts there; those of a run do not."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.data import make_tokenizer
from megalite.errors import DataError
from tests.unit.convert.chat_model import save_model, save_tokenizer
from tests.unit.inference.tiny_checkpoint import write_checkpoint
from tools.command_line import run_tool
from tools.evaluate import main as evaluate
from tools.generate_text import main as generate

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
BEGIN, END = 300, 297
NONE = [301, 302, 303]  # ids of the model that its tokenizer does not have
TEXT = "the quick brown fox jumps over lazy dogs and so on"
SPECIAL = {"<|begin|>": {"id": "<|begin|>", "ids": [BEGIN], "tokens": ["<|begin|>"]}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": SPECIAL,
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
ROBERTA = {"type": "RobertaProcessing", "sep": ["<|im_end|>", END], "cls": ["<|begin|>", BEGIN]}
PROCESSORS: dict[str, Any] = {
    "llama": {"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]},
    "gemma": TEMPLATE,
    "two": {"type": "Sequence", "processors": [ROBERTA | {"trim_offsets": True, "add_prefix_space": False}, TEMPLATE]},
    "bert": {**ROBERTA, "type": "BertProcessing"},
    "only behind": TEMPLATE | {"single": TEMPLATE["single"][::-1]},
    "qwen": BYTE_LEVEL,
    "none": None,
}


def with_processor(folder: Path, processor: Any) -> Path:
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder)
    return with_processor(folder, PROCESSORS["llama"])


def call(main: Any, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, str]:
    capsys.readouterr()
    assert run_tool(main, [*flags, "--device", "cpu"]) == 0, capsys.readouterr().err
    return capsys.readouterr()


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_stands_in_front_is_what_transformers_puts_there(name: str, tmp_path: Path) -> None:
    with_processor(tmp_path, PROCESSORS[name])
    ours = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)(TEXT).input_ids
    plain = ours.encode(TEXT)
    at = next(at for at in range(len(theirs)) if theirs[at : at + len(plain)] == plain)
    assert list(ours.front) == theirs[:at]
    assert bool(at) == (name in ("llama", "gemma", "two", "bert"))


def test_an_id_that_is_none_is_refused(tmp_path: Path) -> None:
    with_processor(tmp_path, ROBERTA | {"type": "BertProcessing", "cls": ["x", 301]})
    with pytest.raises(DataError, match="puts id 301 in front of texts; its ids end at 300"):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


def test_a_folder_without_a_tokenizer_says_what_to_copy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    flags = ["--load", str(tmp_path / "model"), "--device", "cpu", "--max-new-tokens", "1"]
    assert run_tool(generate, [*flags, "--prompt", "a"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: --load={tmp_path / 'model'}: text must be numbers (")
    assert error.endswith("; it holds no tokenizer: copy the model's tokenizer.json there")
    assert run_tool(generate, [*flags, "--prompt", "1 2"]) == 0


@pytest.mark.parametrize("prompt", ["the quick", ""])
def test_prompts_are_continued_as_by_transformers(prompt: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    asked = tokenizer(prompt, return_tensors="pt")
    assert int(asked.input_ids[0, 0]) == BEGIN
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    found = peer.generate(**asked, max_new_tokens=12, do_sample=False, repetition_penalty=1.0, suppress_tokens=NONE)
    new = [int(token) for token in found[0, asked.input_ids.shape[1] :] if token not in (END, 298)]
    flags = ("--load", str(model), "--prompt", prompt, "--greedy", "--max-new-tokens", "12")
    out, error = call(generate, capsys, *flags)
    assert out == prompt + tokenizer.decode(new) + "\n" and "note:" not in error


def test_texts_are_scored_as_by_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(model).double().eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(peer(ids, labels=ids).loss)
    flags = ("--load", str(model), "--text-file", str(tmp_path / "a.txt"), "--json")
    found = json.loads(call(evaluate, capsys, *flags)[0])
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert (found["num_tokens"], found["num_bytes"]) == (ids.shape[1] - 1, len(TEXT))
    word = tokenizer(" " + TEXT.split()[-1], add_special_tokens=False).input_ids
    context = tokenizer(TEXT.rsplit(None, 1)[0]).input_ids
    with torch.no_grad():
        scores = peer(torch.tensor([context + word])).logits[0].log_softmax(-1)
    likelihood = sum(float(scores[len(context) - 1 + at, token]) for at, token in enumerate(word))
    found = json.loads(call(evaluate, capsys, *flags, "--task", "lambada")[0])
    assert found["last_word_ppl"] == pytest.approx(math.exp(-likelihood), rel=1e-4)


def test_a_run_goes_on_without_and_says_so(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    (tmp_path / "a.txt").write_text(TEXT)
    for name in ("llama", "none"):
        folder = with_processor(tmp_path / name, PROCESSORS[name])
        tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
        write_checkpoint(tmp_path / f"run {name}", tokenizer=tokenizer)
        load = ("--load", str(tmp_path / f"run {name}"))
        text, error = call(generate, capsys, *load, "--prompt", "the", "--greedy", "--max-new-tokens", "8")
        scored, more = call(evaluate, capsys, *load, "--text-file", str(tmp_path / "a.txt"))
        note = "note: texts begin without the tokenizer's special tokens (id 300), as in the training of "
        assert (error.count(note), more.count(note)) == ((1, 1) if name == "llama" else (0, 0)), error
        texts.append((text, scored.split("\n", 1)[1]))
    assert texts[0] == texts[1]
