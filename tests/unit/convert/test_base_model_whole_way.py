"""A base model (no template) through pretraining, adapters and export: to transformers and peft it is what it was, and
what it writes is what ours writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.comm.world import World
from megalite.config import Sampling, parse
from megalite.convert import AdaptedSource, CheckpointSource, open_checkpoint, write_huggingface, write_peft
from megalite.convert.registry import family_of
from megalite.inference import generate, load_for_inference
from megalite.train.run import open_run
from megalite.train.starting_point import offer_of
from tests.unit.convert.chat_model import STOP, TALK, save_model, save_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = "the quick brown fox jumps over the lazy dogs. "
FLAGS = (
    "--use-checkpoint-args --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 3e-2 "
    "--eval-iters 0 --num-workers 0 --device cpu --split 1,0,0"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("base")
    source = home / "source"
    save_model(
        source,
        sampling={"max_new_tokens": 24, "eos_token_id": 298, "pad_token_id": None},
        eos_token_id=298,
        pad_token_id=None,
    )
    save_tokenizer(source, None, eos_token=STOP, pad_token=None)
    (home / "text.jsonl").write_text((json.dumps({"text": TEXT * 3}) + "\n") * 12)
    data = ["--data-path", str(home / "text.jsonl"), "--data-cache-path", str(home / "cache"), "--load", str(source)]
    for save, more in (("whole", []), ("lora", ["--lora", "rank=4", "alpha=8"])):
        config = parse([*FLAGS, *data, "--save", str(home / save), *more], world_size=1, read_offer=offer_of)
        with open_run(config, World()) as run:
            for step in range(2):
                run.trainer.train_step(drain=step == 1)
            run.state.save(run.trainer.progress)
    write_huggingface(CheckpointSource(home / "whole"), home / "pretrained")
    adapted = open_checkpoint(home / "lora")
    assert isinstance(adapted, AdaptedSource)
    write_huggingface(adapted, home / "merged")
    write_peft(adapted, home / "adapter")
    return home


def test_the_balance_of_experts_is_that_of_the_model(tmp_path: Path) -> None:
    """c k / L of `router_aux_loss_coef` c is what `--use-checkpoint-args` trains with, unless flags say otherwise, and
    what the run's export says."""
    given = transformers.GptOssConfig(
        vocab_size=64, hidden_size=16, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.003,
    )  # fmt: skip
    transformers.GptOssForCausalLM(given).save_pretrained(tmp_path / "oss")
    flags = [*FLAGS, "--mock-data", "--vocab-size", "64", "--load", str(tmp_path / "oss")]
    found = parse(flags, world_size=1, read_offer=offer_of).model
    assert found.experts.moe_aux_loss_coeff == pytest.approx(0.003 * 2 / 4, rel=1e-12)
    for words, expected in (("--moe-aux-loss-coeff 0.2", 0.2), ("--moe-router-load-balancing-type none", 0.0)):
        own = parse([*flags, *words.split()], world_size=1, read_offer=offer_of).model
        assert own.experts.moe_aux_loss_coeff == expected
    assert family_of(found, "gpt_oss").config(found)["router_aux_loss_coef"] == 0.003


def load(where: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False).eval()


def written_by(model: Any, where: Path) -> list[int]:
    """Ids behind the prompt, by the folder's own tokenizer and generation_config.json."""
    prompt = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)(TEXT, return_tensors="pt")
    with torch.no_grad():
        found: Any = model.generate(**prompt)
    return [int(token) for token in found[0, prompt["input_ids"].shape[1] :]]


@pytest.mark.parametrize("export", ["pretrained", "merged", "adapter"])
def test_no_template_appears_and_no_token_moves(export: str, folder: Path) -> None:
    source, there = (transformers.AutoTokenizer.from_pretrained(folder / name) for name in ("source", export))
    assert source.chat_template is None and there.chat_template is None
    for tokenizer in (source, there):
        with pytest.raises(ValueError, match="chat_template"):
            tokenizer.apply_chat_template(TALK)
    assert source.special_tokens_map == there.special_tokens_map
    assert source(TEXT)["input_ids"] == there(TEXT)["input_ids"]
    if export != "adapter":
        for kind in (transformers.GenerationConfig, transformers.AutoConfig):
            before, after = (kind.from_pretrained(folder / name).to_dict() for name in ("source", export))
            assert before | {"_name_or_path": ""} == after | {"_name_or_path": ""}


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_ours_transformers_and_peft_write_the_same(name: str, folder: Path) -> None:
    export = {"whole": "pretrained", "lora": "merged"}[name]
    theirs = written_by(load(folder / export), folder / export)
    assert len(theirs) == 24 and theirs != written_by(load(folder / "source"), folder / "source"), "training is at work"
    loaded = load_for_inference(folder / name, device="cpu")
    assert loaded.stops == (298,)
    prompt = loaded.tokenizer.encode(TEXT)
    assert generate(loaded, [prompt], Sampling(greedy=True), max_new_tokens=24)[0][0] == theirs
    if name == "lora":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        adapted = peft.PeftModel.from_pretrained(load(folder / "source"), folder / "adapter")
        assert written_by(adapted, folder / "adapter") == theirs


def test_the_stop_token_of_the_source_stops(folder: Path) -> None:
    sure = transformers.LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.tensor([298]), 1e4)])
    for export in ("source", "pretrained", "merged"):
        ids = load(folder / export).generate(torch.tensor([[5, 6]]), logits_processor=sure)
        assert ids[0, 2:].tolist() == [298]
