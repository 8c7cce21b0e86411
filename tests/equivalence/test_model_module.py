"""`--model-module`: a run trains somebody's module to the weights that a plain loop over it reaches."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from equivalence import own_models
from equivalence.layouts import saved_tensors
from megalite.comm import ParallelMesh, World
from megalite.config import Config, parse
from megalite.errors import CheckpointError, ConfigError
from megalite.inference import load_for_inference
from megalite.library import read_weights
from megalite.testing import run_ranks, try_ranks
from megalite.train import dry_run, run_training
from megalite.train.run_data import open_data, resolve_tokenizer
from pretrain_gpt import main

FILE = Path(own_models.__file__)
STEPS, RATE, SAMPLES = 4, 0.5, 8
BASE = (
    f"--seq-length 8 --micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters {STEPS} --eval-iters 1 "
    "--device cpu --num-workers 0 --mock-data --vocab-size 32 --fp64 --no-exit-signal-handler --log-interval 1 "
)
CONSTANT = f"--lr {RATE} --lr-decay-style constant --clip-grad 0 --weight-decay 0 "
PLAIN = f"--optimizer sgd --optimizer-args sgd_momentum=0 {CONSTANT}"
ADAM = "--lr 1e-2 --clip-grad 0.5 --weight-decay 0.1 "
GATED = "--tensor-parallel-globs col:*.up col:*.gate row:*.down vocab:0 vocab:4 "
LLAMA = (
    "--tensor-parallel-globs col:*.q_proj col:*.k_proj col:*.v_proj col:*.gate_proj col:*.up_proj row:*.o_proj "
    "row:*.down_proj vocab:model.embed_tokens vocab:lm_head "
)


def flags_of(name: str, *more: str) -> list[str]:
    return " ".join([BASE, f"--model-module {FILE}:{name}", *more]).split()


def trained(world: World, argv: list[str]) -> None:
    assert run_training(parse(argv, world_size=world.size), world) == 0


def compiled(world: World, argv: list[str]) -> None:
    trained(world, argv)
    assert counters["stats"]["unique_graphs"] > 0


def records(folder: Path, kind: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines if line["kind"] == kind}


def model(name: str) -> nn.Module:
    made: nn.Module = own_models.gpt2(32, 8) if name == "gpt2" else getattr(own_models, name)(vocab_size=32)
    return made.double()


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    config, tokenizer = resolve_tokenizer(parse(flags_of("mixer", PLAIN)))
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    loader = data.train_loader(0)
    found = [loader.next_batch(SAMPLES) for _ in range(STEPS)]
    return [(torch.cat([mb.tokens for mb in batch]), torch.cat([mb.labels for mb in batch])) for batch in found]


def plain_loop(name: str, config: Config, delay: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of gradient descent by hand; gradients are `delay` updates old."""
    torch.manual_seed(config.training.seed)
    module = model(name)
    losses, history = [], [{key: p.detach().clone() for key, p in module.named_parameters()}]
    for step, (tokens, labels) in enumerate(batches()):
        newest = history[-1]
        for key, p in module.named_parameters():
            p.data.copy_(history[max(0, step - delay)][key])
        module.zero_grad()
        out: Any = module(tokens)
        logits = out if isinstance(out, Tensor) else out.logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(float(loss))
        moves = {key: 0.0 if p.grad is None else RATE * p.grad for key, p in module.named_parameters()}
        history.append({key: newest[key] - moves[key] for key in newest})
    return losses, history[-1]


def check(tmp_path: Path, name: str, layout: str, ranks: int, delay: int = 0, close: float = 1e-12) -> None:
    compiles = "--compile" in layout
    argv = flags_of(name, PLAIN, layout, f"--save {tmp_path}")
    run_ranks(compiled if compiles else trained, ranks, argv, timeout=600 if compiles else 60)
    losses, expected = plain_loop(name, parse(flags_of(name, PLAIN)), delay)
    assert list(records(tmp_path, "train").values()) == pytest.approx(losses, rel=0, abs=close)
    module = model(name)
    module.load_state_dict(read_weights(tmp_path), strict=True)
    found = dict(module.named_parameters())
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].detach(), tensor, rtol=0, atol=close)
    first = plain_loop(name, parse(flags_of(name, PLAIN)), 0)
    assert delay == 0 or abs(first[0][-1] - losses[-1]) > 1e-6, "a delay that changes nothing shows nothing"


def test_a_run_is_the_plain_loop(tmp_path: Path) -> None:
    check(tmp_path, "mixer", "--pipeline-model-parallel-size 2 --zero-stage 1", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout", "ranks", "delay"),
    [
        ("mixer", "", 1, 0),
        ("mixer", "--pipeline-model-parallel-size 2 --zero-stage 1", 4, 0),
        ("mixer", "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --staleness-correction none", 2, 1),
        ("mixer", "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --staleness-correction none", 4, 1),
        ("mixer", "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --zero-stage 3", 4, 0),
        ("mixer", "--pipeline-model-parallel-size 2 --pipeline-schedule chimera --zero-stage 2", 2, 0),
        ("untied", f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {GATED}", 4, 0),
        ("gpt2", "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 4, 0),
        ("gpt2", "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --zero-stage 2", 2, 0),
        ("gpt2", "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --staleness-correction none", 2, 1),
        ("llama", f"--tensor-model-parallel-size 2 {LLAMA}", 2, 0),
        ("llama", f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {LLAMA}", 4, 0),
    ],
)  # fmt: skip
def test_any_layout_is_the_plain_loop(tmp_path: Path, name: str, layout: str, ranks: int, delay: int) -> None:
    check(tmp_path, name, layout, ranks, delay)


PATIENT = "--compile --distributed-timeout-minutes 10"


@pytest.mark.parametrize(
    ("name", "layout", "delay"),
    [
        pytest.param("mixer", "zb-h1 --zero-stage 1", 0, marks=pytest.mark.landing),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("gpt2", "1f1b --recompute-granularity full --recompute-num-layers 1", 0),
                ("mixer", "2bw --staleness-correction none", 1),
                ("llama", "zb-v --zero-stage 3", 0),
            ]
        ),
    ],
)
def test_compiled_layers_are_the_plain_loop(tmp_path: Path, name: str, layout: str, delay: int) -> None:
    close = 1e-8 if name == "llama" else 1e-12  # sines of its positions are fp32, and the compiler has its own
    check(tmp_path, name, f"{PATIENT} --pipeline-model-parallel-size 2 --pipeline-schedule {layout}", 2, delay, close)


THEIRS = {
    "olmo2": 1e-12,
    "gemma3": 1e-7,
    "mamba2": 1e-6,
    "deepseek3": 1e-10,
    "qwen3_moe": 1e-12,
    "qwen3_next": 1e-7,
}
"""Models of transformers, and how close they come in fp64: parts of some compute in fp32."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full if n != "olmo2" else pytest.mark.landing]) for n in THEIRS]
)
def test_models_of_transformers_are_the_plain_loop(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "--pipeline-model-parallel-size 2", 2, close=THEIRS[name])


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path: Path) -> None:
    lines = {
        "nowhere": f"{FILE} has no function of that name; it has",
        "torch": "is no function that makes a module",
        "wants_width": "takes width, which has no default; vocab_size and seq_length are given where they are taken",
        "broken": "RuntimeError: no weights here",
        "no_module": "returns int; a torch.nn.Module is wanted",
        "depends": "depends on values of the input",
        "two_dimensional": "returns [1, 48] for tokens [1, 8]; logits [1, 8, vocabulary] are wanted",
        "too_few": "returns logits of 8 ids, the tokenizer has 32",
    }
    for name, line in lines.items():
        config = parse(flags_of(name, PLAIN, f"--save {tmp_path}"))
        with pytest.raises(ConfigError, match=re.escape(line)) as caught:
            dry_run(config, {}, 1)
        text = str(caught.value)
        assert text.startswith(f"--model-module={FILE}:{name}: ") and "\n" not in text
    with pytest.raises(ConfigError, match="is a col or a row missing in --tensor-parallel-globs"):
        dry_run(parse(flags_of("untied", PLAIN, "--tensor-model-parallel-size 2 --nprocs 2 --tensor-parallel-globs "
                               "row:*.down")), {}, 2)  # fmt: skip
    case = try_ranks(trained, 2, flags_of("averaging", PLAIN, "--pipeline-model-parallel-size 2"))
    assert case.outcome.exit_code == 2 and "averaging: reads later tokens: another last token moves" in case.describe()
    tied = "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream --nprocs 2"
    with pytest.raises(ConfigError, match="words.weight would drift apart"):
        dry_run(parse(flags_of("mixer", PLAIN, tied)), {}, 2)


def test_a_dry_run_counts(tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --nprocs 4"
    text = dry_run(parse(flags_of("untied", PLAIN, layout, GATED)), {}, 4)
    module = own_models.untied(32)
    assert f"({sum(p.numel() for p in module.parameters()):,}); by stage" in text
    assert "model_module" in text and "hidden_size" not in text


@pytest.mark.full
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Dropout and all."""
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --save-interval 1"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(trained, 4, flags_of("dropping", ADAM, layout, f"--save {whole}"))
    argv = flags_of("dropping", ADAM, layout, f"--save {killed} --auto-resume")
    try_ranks(trained, 4, argv, faults=["kill@iteration:rank=1:after=3"])
    run_ranks(trained, 4, argv)
    expected, found = saved_tensors(whole), saved_tensors(killed)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert records(whole, "valid") == records(killed, "valid")


@pytest.mark.full
def test_a_checkpoint_moves_to_another_layout(tmp_path: Path) -> None:
    whole, first, then = tmp_path / "whole", tmp_path / "first", tmp_path / "then"
    run_ranks(trained, 1, flags_of("untied", ADAM, f"--save {whole}"))
    run_ranks(trained, 2, flags_of("untied", ADAM, f"--save {first} --exit-interval 2 --zero-stage 2"))
    layout = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {GATED}"
    run_ranks(trained, 4, flags_of("untied", ADAM, layout, f"--load {first} --save {then}"))
    for kind in ("train", "valid"):
        expected, found = records(whole, kind), records(then, kind)
        assert found and all(abs(expected[step] - loss) < 1e-12 for step, loss in found.items())
    expected, found = saved_tensors(whole), saved_tensors(then)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_the_command_trains_what_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found_here.py").write_text(FILE.read_text())
    monkeypatch.chdir(tmp_path)
    argv = [*BASE.split(), *PLAIN.split(), "--save", "runs", "--train-iters", "1"]
    assert main([*argv, "--model-module", "found_here:mixer"]) == 0
    assert (tmp_path / "runs" / "COMPLETED").is_file()
    again = ["--config", "runs/config.yaml", "--load", "runs", "--save", "runs", "--train-iters", "2"]
    assert main(again) == 0, "what it wrote is what it reads"
    with pytest.raises(CheckpointError, match="pretrain_gpt.py --skip-train --load, or give the module its weights"):
        load_for_inference(tmp_path / "runs")
