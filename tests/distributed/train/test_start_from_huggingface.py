"""`--load` of a Hugging Face directory: every layout begins with its weights and has the losses of transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megalite.checkpoint import CheckpointReader, latest
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import parse
from megalite.convert import CheckpointSource, HuggingFaceSource, write_huggingface
from megalite.errors import CheckpointError
from megalite.testing import run_ranks
from megalite.train.run import open_run
from megalite.train.run_data import open_data, resolve_tokenizer
from megalite.train.starting_point import offer_of
from pretrain_gpt import main as pretrain

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V, S = 61, 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", dict(vocab_size=V, n_positions=S, n_embd=32, n_layer=2, n_head=4)),
    "Llama": (
        "LlamaForCausalLM",
        dict(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=S, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --lr-decay-style constant --fp64 --mock-data "
    "--optimizer sgd --optimizer-args sgd_momentum=0.5 --weight-decay 0 --clip-grad 0 --eval-iters 0 --num-workers 0 "
    "--device cpu"
).split()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory a case, as transformers writes it: random weights, every one of which matters."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, values) in CASES.items():
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**values, attn_implementation="eager")
        model = getattr(transformers, kind)(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    return folder


@cache
def expected(directory: str) -> list[float]:
    """Losses of two steps of transformers' model under torch's own SGD, on the batches that the run would read."""
    config, tokenizer = resolve_tokenizer(parse([*FLAGS, "--load", directory, "--use-checkpoint-args"], **READS))
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    ).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
    losses = []
    with data.train_loader(0) as loader:
        for _ in range(2):
            batches = loader.next_batch(4)
            optimizer.zero_grad()
            total = 0.0
            for batch in batches:
                logits = model(input_ids=batch.tokens).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()) / len(batches)
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
    return losses


READS: dict[str, Any] = {"read_offer": offer_of}


def two_steps(world: World, argv: list[str]) -> list[float]:
    losses = []
    with open_run(parse(argv, world_size=world.size, **READS), world) as run:
        assert run.trainer.iteration == 0
        for step in range(2):
            losses.append(float(run.trainer.train_step(drain=step == 1).lm_loss))
    return losses


BY_DEFAULT = {("GPT2", 2, 2), ("Llama", 1, 2)}


def marks(case: str, tp: int, pp: int) -> list[pytest.MarkDecorator]:
    """Half of them run with --landing, all of them with --full."""
    if (case, tp, pp) in BY_DEFAULT:
        return []
    return [pytest.mark.landing if (case == "GPT2") == (tp == pp) else pytest.mark.full]


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [pytest.param(case, tp, pp, marks=marks(case, tp, pp)) for case in CASES for tp in (1, 2) for pp in (1, 2)],
)
def test_losses_are_those_of_transformers(case: str, tp: int, pp: int, models: Path) -> None:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}".split()
    argv = [*FLAGS, *layout, "--load", str(models / case), "--use-checkpoint-args", "--zero-stage", str(tp - 1)]
    losses = run_ranks(two_steps, tp * pp, argv)[0]
    # transformers computes RMSNorm and rotary angles in fp32
    tolerance = 1e-10 if case == "GPT2" else 5e-6
    torch.testing.assert_close(losses, expected(str(models / case)), rtol=tolerance, atol=0)


def command(model: Path, save: Path, *more: str) -> list[str]:
    return [*FLAGS, "--load", str(model), "--save", str(save), *more]


def test_the_run_that_begins_is_a_run_of_its_own(models: Path, tmp_path: Path, capsys: Any) -> None:
    model, save = models / "Llama", tmp_path / "run"
    assert pretrain(command(model, save, "--use-checkpoint-args", "--exit-interval", "1")) == 0
    out = capsys.readouterr().out
    assert f"begins with  {model} (Hugging Face llama)" in out
    assert "iteration 0, data order, optimizer state and seed are new" in out
    start = json.loads((save / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["iteration"], start["loaded_path"]) == (0, str(model))

    # its checkpoints are like any other: nothing of the Hugging Face directory is needed any more
    resumed = [*FLAGS, "--load", str(save), "--save", str(save), "--use-checkpoint-args"]
    assert pretrain(resumed) == 0
    out = capsys.readouterr().out
    assert "iteration 1, 4 samples consumed, weights, optimizer state" in out and "changed       nothing" in out
    newest = latest(save)
    assert newest is not None and newest.name == "iter_0000002"
    assert "optimizer/momentum_buffer/head.output.weight" in CheckpointReader(newest).names

    assert pretrain(command(model, save, "--use-checkpoint-args")) == 2
    assert f"--save={save}: holds another run (newest iter_0000002)" in capsys.readouterr().err


def test_positions_that_are_new_to_the_model_are_told_and_exported(models: Path, tmp_path: Path, capsys: Any) -> None:
    def said(*more: str) -> str:
        assert pretrain([*FLAGS, "--use-checkpoint-args", *more]) == 0
        shown = capsys.readouterr()
        return shown.out + shown.err

    model, save = models / "Llama", tmp_path / "run"
    line = f"the model is for {S} positions (--max-position-embeddings); further ones are new to it"
    assert "positions (--max" not in said("--load", str(model), "--dry-run")
    longer = ("--load", str(model), "--save", str(save), "--seq-length", str(2 * S))
    assert f"--seq-length={2 * S}: {line}" in said(*longer, "--dry-run")
    assert said(*longer).count(line) == 1
    for number, more in enumerate(((), ("--seq-length", str(S)))):  # what it has seen it keeps, whatever comes next
        folder = tmp_path / str(number)
        assert line not in said("--load", str(save), "--save", str(folder), "--finetune", *more)
        write_huggingface(CheckpointSource(folder), tmp_path / f"export{number}")
        written = json.loads((tmp_path / f"export{number}" / "config.json").read_text())
        assert written["max_position_embeddings"] == 2 * S


def test_one_command_begins_with_the_model_and_goes_on_when_requeued(models: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--use-checkpoint-args", "--auto-resume", "--finetune", "--no-load-optim", "--exit-interval", "1")
    requeued = command(models / "Llama", tmp_path / "run", *flags)
    for account in ("iteration 0, data order", "iteration 1, 4 samples consumed, weights, optimizer state"):
        assert pretrain(requeued) == 0
        assert account in capsys.readouterr().out
    assert pretrain(command(models / "Llama", tmp_path / "whole", *flags[:-2])) == 0
    ours, whole = (CheckpointReader(tmp_path / name / "iter_0000002") for name in ("run", "whole"))
    assert set(ours.names) == set(whole.names)
    assert all(torch.equal(ours.read(name), whole.read(name)) for name in ours.names)

    line = "--ckpt-step=1: of --load, or of --save (--auto-resume)? let --load name the step's directory"
    assert pretrain([*requeued, "--ckpt-step", "1"]) == 2
    assert line in capsys.readouterr().err


def test_flags_without_use_checkpoint_args_must_agree(models: Path, tmp_path: Path, capsys: Any) -> None:
    model = models / "Llama"
    shape = (
        "--model-type llama --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
        "--num-query-groups 2 --seq-length 16 --norm-epsilon 1e-6"
    ).split()
    assert pretrain(command(model, tmp_path / "a", *shape, "--exit-interval", "1")) == 0
    capsys.readouterr()
    assert pretrain(command(model, tmp_path / "b", *shape, "--num-layers", "3", "--ffn-hidden-size", "64")) == 2
    where = model / "config.json"
    assert capsys.readouterr().err.splitlines() == [
        f"error: --num-layers=3: {where} has 2; give that, or --use-checkpoint-args",
        f"error: --ffn-hidden-size=64: {where} has 48; give that, or --use-checkpoint-args",
    ]
    assert pretrain(command(model, tmp_path / "c", *shape[2:])) == 2
    assert f"--normalization=LayerNorm: {where} has RMSNorm; give that" in capsys.readouterr().err
    assert pretrain(command(model, tmp_path / "d", "--num-layers", "2")) == 2
    line = "--hidden-size: required (as a flag, or as 'hidden_size' in a --config file); --use-checkpoint-args takes it"
    assert f"{line} from {where}" in capsys.readouterr().err
    assert not any((tmp_path / name).exists() for name in "bcd")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ckpt-step", "3"], "--ckpt-step=3: {model} is a Hugging Face model and has no steps; drop it"),
        (
            ["--use-checkpoint-opt-param-scheduler"],
            "--use-checkpoint-opt-param-scheduler: a Hugging Face model has no schedules; drop it",
        ),
        (["--save", "{model}"], "--save={model}: is the Hugging Face model of --load; choose a new directory"),
        (
            ["--hidden-size", "64"],
            "--hidden-size=64: {model}/config.json has 32; drop the flag, or --use-checkpoint-args",
        ),
    ],
)
def test_what_a_model_without_a_run_can_not_give(
    flags: list[str], line: str, models: Path, tmp_path: Path, capsys: Any
) -> None:
    model = models / "GPT2"
    more = [flag.format(model=model) for flag in flags]
    assert pretrain(command(model, tmp_path / "run", "--use-checkpoint-args", *more)) == 2
    assert capsys.readouterr().err == f"error: {line.format(model=model)}\n"


def test_its_tokenizer_is_taken_unless_one_is_named(models: Path, tmp_path: Path, capsys: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tmp_path / "model"
    model.mkdir()
    for path in (models / "GPT2").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    words = {"<|endoftext|>": 0, **{word: number for number, word in enumerate("to be or not that is".split(), 1)}}
    definition = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    definition.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    definition.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (tmp_path / "text.txt").write_text("to be or not to be that is " * 60)
    text = ["--no-mock-data", "--data-path", str(tmp_path / "text.txt"), "--split", "1,0,0"]
    argv = [*FLAGS, *text, "--data-cache-path", str(tmp_path / "cache"), "--load", str(model), "--use-checkpoint-args"]

    def kind_and_vocabulary(*more: str) -> tuple[str | None, int]:
        config = parse([*argv, *more], **READS)
        assert config.model.vocab_size == V, "the model's, which is larger than the tokenizer's"
        _, tokenizer = resolve_tokenizer(config)
        return tokenizer.kind, tokenizer.vocab_size

    assert kind_and_vocabulary() == ("HuggingFaceTokenizer", 7)
    assert kind_and_vocabulary("--tokenizer-type", "NullTokenizer") == ("NullTokenizer", V)
    assert pretrain([*argv, "--save", str(tmp_path / "run")]) == 0
    assert f"begins with  {model}" in (out := capsys.readouterr().out) and "weights, architecture, tokenizer" in out
    newest = latest(tmp_path / "run")
    assert newest is not None and (newest / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert CheckpointSource(newest).origin == HuggingFaceSource(model).origin
    more = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), "--train-iters", "3"]
    assert pretrain([*argv, *more, "--override-opt-param-scheduler"]) == 0
    assert CheckpointSource(tmp_path / "run").origin == HuggingFaceSource(model).origin, "also of a run that goes on"


def one_rank_can_not_read(world: World, argv: list[str]) -> str:
    read = HuggingFaceSource.read

    def broken(self: HuggingFaceSource, name: str) -> torch.Tensor:
        if world.rank == 1 and name.startswith("layers.1"):
            raise CheckpointError(f"{name}: cannot be read")
        return read(self, name)

    HuggingFaceSource.read = broken  # type: ignore[method-assign]  # the rank is forked for this test
    try:
        two_steps(world, argv)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_file_that_one_rank_can_not_read_ends_all(models: Path) -> None:
    argv = [*FLAGS, "--load", str(models / "GPT2"), "--use-checkpoint-args", "--tensor-model-parallel-size", "2"]
    said = run_ranks(one_rank_can_not_read, 2, argv)
    assert said[0] == said[1] and said[0].endswith(": cannot be read [rank 1]")


def test_a_file_that_is_cut_short_is_refused_before_ranks_start(models: Path, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (models / "GPT2").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert pretrain(command(model, tmp_path / "run", "--use-checkpoint-args")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {weights}: not a safetensors file") and error.count("\n") == 1
