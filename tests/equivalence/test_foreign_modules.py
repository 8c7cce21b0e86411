"""A module of one piece, cut into layers: the same numbers as the module, in one process or in a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence import own_models
from megalite.comm import ParallelMesh, World
from megalite.errors import ConfigError
from megalite.library import Pipeline, ShardedOptimizer, layers_from_module
from megalite.library.cutting import crossings, cut
from megalite.library.modules import Sample
from megalite.schedule import build_program
from megalite.testing import run_ranks

VOCAB, LENGTH, SAMPLES, MICRO_BATCHES = 32, 8, 2, 4


def mixer() -> nn.Module:
    return own_models.mixer(VOCAB)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCAB, n_positions=LENGTH)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **still))


def sizes(layers: int = 2) -> dict[str, Any]:
    return dict(num_hidden_layers=layers, hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=VOCAB)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes(), num_key_value_heads=1))


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**sizes(), num_key_value_heads=1, head_dim=8, sliding_window=4))


def phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**sizes()))


MODULES: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made  # type: ignore[attr-defined]  # functions
    for made in (mixer, gpt2, llama, gemma, phi)
}
THEIRS = ["gpt2", "llama", "gemma", "phi"]


def made(kind: str) -> nn.Module:
    torch.manual_seed(4)
    module = MODULES[kind]().double()
    for parameter in module.parameters():  # where everything is 0 or 1, mistakes would not be seen
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter += 0.1 * torch.randn_like(parameter)
    return module


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    out = module(tokens)
    return out if isinstance(out, Tensor) else out.logits  # type: ignore[no-any-return]  # of transformers


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, -2), target.flatten())


def batches(replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    shape = (replicas, MICRO_BATCHES, SAMPLES, LENGTH + 1)
    text = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
    return [[(sample[:, :-1], sample[:, 1:]) for sample in replica] for replica in text]


@pytest.mark.parametrize("kind", ["mixer", *(pytest.param(kind, marks=pytest.mark.full) for kind in THEIRS)])
def test_the_layers_compute_what_the_module_computes(kind: str) -> None:
    module, tokens = made(kind), batches(1)[0][0][0]
    layers = layers_from_module(module, tokens)
    x: Any = (tokens,)
    for layer in layers:
        x = layer(*x, inputs=(tokens,))
        x = x if isinstance(x, tuple) else (x,)
    assert len(layers) > 6
    assert torch.equal(x[0], logits(module, tokens))


def gradients(world: World, kind: str, pp: int, schedule: str, zero_stage: int) -> tuple[float, dict[str, Tensor]]:
    """By one step of SGD with a rate of 1."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=pp)
    module = made(kind)
    layers = layers_from_module(module, batches(1)[0][0][0])
    example = torch.empty(SAMPLES, LENGTH, dtype=torch.int64, device="meta")
    pipe = Pipeline(layers, loss=loss, example=example, schedule=schedule, mesh=mesh)
    optimizer = ShardedOptimizer(pipe, "sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, zero_stage=zero_stage)
    before = optimizer.weights()
    total = pipe.step(batches(mesh.size("dp"))[mesh.coordinate("dp")])
    optimizer.step()
    return total.item(), {name: before[name] - value for name, value in optimizer.weights().items()}


@pytest.mark.parametrize(
    ("kind", "pp", "dp", "schedule", "zero_stage"),
    [
        ("mixer", 2, 2, "1f1b", 3),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("mixer", 4, 1, "1f1b", 1),
                ("mixer", 2, 1, "zb-v", 0),
                ("mixer", 2, 1, "chimera", 1),
                ("mixer", 1, 2, "1f1b", 2),
                *((kind, 2, 2, "1f1b", 2) for kind in THEIRS),
                *((kind, 4, 1, "zb-h1", 1) for kind in THEIRS),
                ("gpt2", 2, 1, "zb-v", 1),
                ("gemma", 2, 1, "interleaved", 3),
                ("gpt2", 2, 2, "breadth-first", 3),
            )
        ),
    ],
)
def test_gradients_are_the_modules_own(kind: str, pp: int, dp: int, schedule: str, zero_stage: int) -> None:
    module = made(kind)
    pairs = [pair for replica in batches(dp) for pair in replica]
    total = torch.stack([loss(logits(module, x), target) for x, target in pairs]).mean()
    total.backward()
    expected = {
        name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in module.state_dict(keep_vars=True).items()
    }
    seen: set[str] = set()
    for found, own in run_ranks(gradients, pp * dp, kind, pp, schedule, zero_stage):
        assert found == pytest.approx(total.item(), abs=1e-12)
        seen |= own.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == expected.keys()


def postponed(world: World, kind: str) -> list[int]:
    """Weight gradients that a micro-batch's first half of the backward leaves to the second."""
    module, tokens = made(kind), batches(1)[0][0][0]
    pipe = Pipeline(layers_from_module(module, tokens), loss=loss, example=tokens)
    ShardedOptimizer(pipe, lr=0.1)
    stage = pipe.stages[0, 0]
    sample = Sample((tokens,), tokens)
    stage.forward(0, None, sample, torch.ones(()), version=0)
    stage.backward_input(0, None)
    return [len(stage._deferred[0])]


@pytest.mark.parametrize(("kind", "number"), [("mixer", 11), pytest.param("gpt2", 16, marks=pytest.mark.full)])
def test_linear_layers_split_their_backward(kind: str, number: int) -> None:
    """Weights and biases of all linear layers; not a weight that is tied, nor the one that does not learn."""
    assert run_ranks(postponed, 1, kind) == [[number]]


class Several(nn.Module):
    """Integers are needed late, a mask by all blocks, and the floating input by the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kinds, self.last = nn.Linear(6, 8), nn.Embedding(5, 8), nn.Linear(14, 3)
        self.blocks, self.gain = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, kind: Tensor, mask: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks[:2]:
            y = torch.where(mask[:, None], torch.tanh(block(y)) * self.gain, y)
        for block in self.blocks[2:]:
            y = torch.where(mask[:, None], torch.tanh(block(y)), y)
        out: Tensor = self.last(torch.cat([y + self.kinds(kind), x], -1))
        return out


def several(world: World) -> float:
    """By how much gradients differ from the module's own."""
    torch.manual_seed(0)
    module = Several().double()
    inputs = torch.randn(4, 6).double(), torch.tensor([0, 3, 3, 1]), torch.tensor([True, False, True, True])
    loss(module(*inputs), torch.tensor([0, 1, 2, 0])).backward()
    own = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    pipe = Pipeline(layers_from_module(module, inputs), loss=loss, example=inputs, mesh=mesh)
    pipe.step([(inputs, torch.tensor([0, 1, 2, 0]))] * 2)
    here = pipe.parameters((world.rank, 0))
    assert len(here) > 4
    return max(float((p.grad - own[name]).abs().max()) for name, p in here if p.grad is not None)


@pytest.mark.full
def test_several_inputs() -> None:
    assert max(run_ranks(several, 2)) < 1e-12


def test_values_are_wanted() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match=r"layers\[0\]: weight is on meta, without values; build the modules on"):
        Pipeline(layers, loss=loss, example=torch.empty(1, 2))


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that is named
            x = x + 1
        return x


def test_what_depends_on_values_is_refused_with_its_line() -> None:
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "the line that is named" in line)
    with pytest.raises(ConfigError) as raised:
        layers_from_module(Chooses(), torch.ones(2))
    assert f"{Path(__file__)}:{number}: if x.sum() > 0:" in str(raised.value)
    assert "depends on values of the input" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.full
def test_the_cut_of_gpt2() -> None:
    """124 million parameters over 4 ranks, and the last stage's copy of the 38.6 million of the word embedding: 40.8
    million a stage would be even. As many blocks on each stage are 60.7, 21.3, 21.3 and 59.9."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        module = GPT2LMHeadModel(GPT2Config())
    example = torch.empty(1, 64, dtype=torch.int64, device="meta")
    layers = layers_from_module(module, example)
    numbers = [float(layer.parameters) for layer in crossings(layers, (example,), torch.device("meta"))]
    cuts = cut(build_program("1f1b", 4, 8).placement, numbers, None)
    words = 50257 * 768
    held = [sum(numbers[i] for i in items) for items in cuts]
    assert sum(held) == sum(p.numel() for p in module.parameters()) + words  # the last stage has a copy
    assert [round(n / 1e6, 1) for n in held] == [41.7, 42.5, 40.2, 38.6]


class Plain(nn.Module):
    """Nothing tied, nothing skipped: what torch's own pipeline can run, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.blocks(self.words(tokens)))
        return logits


def beside_torch(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of this rank: ours, and those of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(6)
    module = Plain().double()
    theirs = copy.deepcopy(module)
    pairs = batches(1)[0]
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    pipe = Pipeline(layers_from_module(module, pairs[0][0]), loss=loss, example=pairs[0][0], mesh=mesh)
    pipe.step(pairs)
    here = pipe.parameters((world.rank, 0))
    ours = {name: parameter.grad for name, parameter in here if parameter.grad is not None}
    halves = [
        nn.Sequential(theirs.words, theirs.blocks[0], theirs.blocks[1]),
        nn.Sequential(theirs.blocks[2], theirs.blocks[3], theirs.out),
    ]
    stage = PipelineStage(halves[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss)
    tokens, targets = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    schedule.step(tokens) if world.rank == 0 else schedule.step(target=targets)
    return ours, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


@pytest.mark.full
def test_gradients_equal_those_of_torchs_pipeline() -> None:
    found = run_ranks(beside_torch, 2)
    ours, theirs = ({name: g for rank in found for name, g in rank[i].items()} for i in range(2))
    assert ours.keys() == theirs.keys() == dict(Plain().named_parameters()).keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-12)
