"""A chat model of transformers' through adapters at tp2 x pp2, export and merge; a base model through pretraining."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.comm.world import World
from megalite.config import ParallelConfig, Sampling, parse
from megalite.convert import AdaptedSource, CheckpointSource, open_checkpoint, write_huggingface, write_peft
from megalite.data import ChatTemplate, make_tokenizer, preprocess_chat
from megalite.inference import generate, load_for_inference
from megalite.testing import run_ranks
from megalite.train.run import open_run
from megalite.train.starting_point import offer_of
from tests.unit.convert.chat_model import TALK, save_model, save_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HUB_ID = "someone/tiny-chat"
PROMPT = f"<|begin|><|im_start|>user\n{TALK[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
FLAGS = (
    "--use-checkpoint-args --seq-length 32 --calculate-per-token-loss --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 2 --lr 3e-2 --eval-iters 0 --num-workers 0 --device cpu --split 1,0,0"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in Hugging Face's cache, conversations, and two runs: adapters at tp2 x pp2, all weights in one."""
    home = tmp_path_factory.mktemp("chat")
    source = home / "models--someone--tiny-chat" / "snapshots" / "0a1b"
    save_model(source)
    save_tokenizer(source)
    talks = home / "talks.jsonl"
    talks.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(12)))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))
    preprocess_chat([str(talks)], str(home / "talks"), tokenizer, ChatTemplate(tokenizer, str(source)))
    data = ["--data-path", str(home / "talks_messages_document"), "--data-cache-path", str(home / "cache")]
    common = [*FLAGS, *data, "--load", str(source)]
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lora-rank 4".split()
    run_ranks(train, 4, [*common, *layout, "--save", str(home / "lora")])
    train(World(), [*common, "--save", str(home / "whole")])
    (home / "source").symlink_to(source)
    adapted = open_checkpoint(home / "lora")
    assert isinstance(adapted, AdaptedSource)
    write_huggingface(adapted, home / "merged")
    write_peft(adapted, home / "adapter")
    write_huggingface(CheckpointSource(home / "whole"), home / "pretrained")
    return home


def train(world: World, argv: list[str]) -> None:
    with open_run(parse(argv, world_size=world.size, read_offer=offer_of), world) as run:
        for step in range(2):
            run.trainer.train_step(drain=step == 1)
        run.state.save(run.trainer.progress)


def prompt_of(where: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    return tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)


def written_by(model: Any, where: Path, **settings: Any) -> list[int]:
    """Ids that the model writes by its own generation_config.json, beginning with the template's prompt."""
    torch.manual_seed(5)
    prompt = prompt_of(where)
    with torch.no_grad():
        found: Any = model.eval().generate(**prompt, max_new_tokens=24, **settings)
    return [int(token) for token in found[0, prompt["input_ids"].shape[1] :]]


def load(where: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False)


@pytest.mark.parametrize("export", ["merged", "adapter", "pretrained"])
def test_templates_tokens_and_sampling_are_the_sources(export: str, folder: Path) -> None:
    source, there = (transformers.AutoTokenizer.from_pretrained(folder / name) for name in ("source", export))
    for more in (dict(add_generation_prompt=True), dict(continue_final_message=True), dict(tokenize=False)):
        assert source.apply_chat_template(TALK, **more) == there.apply_chat_template(TALK, **more)
    assert source.special_tokens_map == there.special_tokens_map
    if export != "adapter":
        settings = [transformers.GenerationConfig.from_pretrained(folder / name) for name in ("source", export)]
        assert settings[0].to_dict() == settings[1].to_dict()
        assert settings[1].eos_token_id == [298, 297] and settings[1].temperature == 0.6
        configs = [transformers.AutoConfig.from_pretrained(folder / name) for name in ("source", export)]
        assert configs[0].to_dict() | {"_name_or_path": ""} == configs[1].to_dict() | {"_name_or_path": ""}


def test_peft_and_the_merged_model_write_the_same(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.PeftModel.from_pretrained(load(folder / "source"), folder / "adapter")
    for settings in (dict(), dict(do_sample=False)):
        one, other = (written_by(model, folder / "merged", **settings) for model in (load(folder / "merged"), adapted))
        assert one == other
        assert one != written_by(load(folder / "source"), folder / "source", **settings), "the adapters are at work"


@pytest.mark.parametrize("export", ["merged", "pretrained"])
def test_each_of_the_stop_tokens_stops(export: str, folder: Path) -> None:
    """A bias that only calls for one of them: the text is that token and nothing after it."""
    for stop in (297, 298):
        sure = transformers.LogitsProcessorList([lambda ids, scores, stop=stop: scores.index_fill(
            1, torch.tensor([stop]), 1e4)])  # fmt: skip
        assert written_by(load(folder / export), folder / export, logits_processor=sure) == [stop]


def continued(world: World, where: str, tp: int, pp: int) -> list[int]:
    layout = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    loaded = load_for_inference(where, world=world, parallel=layout, device="cpu")
    assert loaded.stops == (297, 298)
    ids = loaded.tokenizer.backend.encode(PROMPT, add_special_tokens=False).ids  # type: ignore[attr-defined]
    return generate(loaded, [ids], Sampling(greedy=True), max_new_tokens=24)[0][0]


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "tp", "pp"), [("source", 2, 2), ("source", 1, 1), ("merged", 1, 2), ("lora", 2, 1)])
def test_ours_writes_what_transformers_writes(name: str, tp: int, pp: int, folder: Path) -> None:
    """Of a Hugging Face folder at any layout, and of a checkpoint of adapters: the same text, up to the stop token."""
    export = "merged" if name == "lora" else name
    theirs = written_by(load(folder / export), folder / export, do_sample=False, repetition_penalty=1.0)
    expected = [token for token in theirs if token not in (297, 298)]
    assert expected and run_ranks(continued, tp * pp, str(folder / name), tp, pp)[0] == expected


def test_exports_are_ready_to_be_pushed(folder: Path) -> None:
    """No path of this machine, everybody may read what is there, and the card is one that the Hub's library reads."""
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    usual = 0o666 & ~current_umask()
    for export, library in (("merged", "transformers"), ("adapter", "peft"), ("pretrained", "transformers")):
        files = [path for path in (folder / export).rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {usual}
        assert not any(str(folder).encode() in path.read_bytes() for path in files)
        card = hub.ModelCard.load(folder / export / "README.md")
        assert (card.data.base_model, card.data.library_name) == (HUB_ID, library)
        assert "| iterations | 2 |" in card.text and "| samples | 8 of at most 32 tokens |" in card.text
        assert ("adapters of rank 4" in card.text) == (export != "pretrained")
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == HUB_ID


def current_umask() -> int:
    now = os.umask(0o022)
    os.umask(now)
    return now
