"""A module of one piece, its linear layers shared by tensor-parallel ranks: the same numbers as the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import ParallelMesh, World
from megalite.errors import ConfigError, MegaliteError
from megalite.library import Pipeline, ShardedOptimizer, layers_from_module
from megalite.testing import run_ranks

VOCAB, LENGTH, SAMPLES, MICRO_BATCHES = 33, 6, 2, 2


class Gated(nn.Module):
    """Parts are multiplied by a weight that all ranks have, between `col` and `row`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 12, bias=False)
        self.gain, self.down = nn.Parameter(torch.tensor(1.5)), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(torch.tanh(self.gate(y)) * self.gain * self.up(y))
        return out


class Words(nn.Module):
    """Tied embeddings of 33 rows, which two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(VOCAB, 8, padding_idx=3), nn.ModuleList(Gated() for _ in range(3))
        self.plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))  # one part alone between the two
        self.out = nn.Linear(8, VOCAB)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.plain(x))
        return logits


OWN = {"col": ["*.gate", "*.up", "plain.0"], "row": ["*.down", "plain.2"], "vocab": ["words", "out"]}
LLAMA = {
    "col": ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"],
    "row": ["*.o_proj", "*.down_proj"],
    "vocab": ["model.embed_tokens", "lm_head"],
}
TABLES: dict[str, Mapping[str, Any]] = {"words": OWN, "llama": LLAMA, "qwen": LLAMA, "gemma": LLAMA}


def made(kind: str) -> nn.Module:
    torch.manual_seed(4)
    if kind == "words":
        return Words().double()
    import transformers

    name = {"llama": "Llama", "qwen": "Qwen3", "gemma": "Gemma2"}[kind]
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, vocab_size=VOCAB, **sizes)
    module: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    return module


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    out = module(tokens)
    return out if isinstance(out, Tensor) else out.logits  # type: ignore[no-any-return]  # of transformers


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def batches(replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    shape = (replicas, MICRO_BATCHES, SAMPLES, LENGTH + 1)
    text = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
    return [[(sample[:, :-1], sample[:, 1:]) for sample in replica] for replica in text]


Found = tuple[float, float, dict[str, Tensor]]


def gradients(world: World, kind: str, tp: int, pp: int, zero_stage: int, save: str | None) -> Found:
    """Loss, norm and gradients, by one step of SGD with a rate of 1."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=tp, pp=pp)
    example = torch.empty(SAMPLES, LENGTH, dtype=torch.int64, device="meta")
    layers = layers_from_module(made(kind), example, mesh=mesh, tensor_parallel=TABLES[kind])
    if kind == "words":  # a stage must not begin with a part
        own = {"body.plain.0.weight", "body.plain.2.weight"}
        assert any(own <= dict(layer.named_parameters()).keys() for layer in layers)
    pipe = Pipeline(layers, loss=loss, example=example, mesh=mesh)
    optimizer = ShardedOptimizer(pipe, "sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, zero_stage=zero_stage)
    before = optimizer.weights()
    total = pipe.step(batches(mesh.size("dp"))[mesh.coordinate("dp")])
    norm = optimizer.step()
    if save is not None:
        optimizer.save(save, 1)
    return total.item(), norm.item(), {name: before[name] - value for name, value in optimizer.weights().items()}


def loaded(world: World, save: str) -> dict[str, Tensor]:
    layers = layers_from_module(made("words"), torch.empty(SAMPLES, LENGTH, dtype=torch.int64))
    pipe = Pipeline(layers, loss=loss, example=torch.empty(SAMPLES, LENGTH, dtype=torch.int64))
    optimizer = ShardedOptimizer(pipe, "sgd", lr=1.0, zero_stage=0)
    optimizer.load(save)
    return optimizer.weights()


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "dp", "zero_stage"),
    [
        ("words", 2, 2, 1, 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("words", 2, 1, 2, 2),
                ("words", 4, 1, 1, 0),
                ("llama", 2, 2, 1, 1),
                ("qwen", 2, 1, 2, 3),
                ("gemma", 2, 2, 1, 0),
            )
        ),
    ],
)
def test_gradients_are_the_modules_own(kind: str, tp: int, pp: int, dp: int, zero_stage: int, tmp_path: Path) -> None:
    module = made(kind)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    pairs = [pair for replica in batches(dp) for pair in replica]
    total = torch.stack([loss(logits(module, x), target) for x, target in pairs]).mean()
    total.backward()
    norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    expected = {name: t.grad for name, t in module.state_dict(keep_vars=True).items() if t.grad is not None}
    save = str(tmp_path / "run") if kind == "words" else None
    seen: set[str] = set()
    for found, its_norm, own in run_ranks(gradients, tp * pp * dp, kind, tp, pp, zero_stage, save):
        assert (found, its_norm) == pytest.approx((total.item(), norm.item()), abs=1e-12)
        seen |= own.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == expected.keys()
    if save is not None:
        for name, value in run_ranks(loaded, 1, save)[0].items():
            torch.testing.assert_close(value, initial[name] - expected[name], rtol=0, atol=1e-12)


def refused(world: World, tables: list[Mapping[str, Any]]) -> list[str]:
    mesh, said = ParallelMesh.build(rank=world.rank, size=world.size, tp=2), []
    for table in tables:
        try:
            layers_from_module(made("words"), torch.zeros(2, 6, dtype=torch.int64), mesh=mesh, tensor_parallel=table)
        except MegaliteError as error:
            said.append(str(error))
    return said


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"column": "*"}, "tensor_parallel: 'column'; 'col', 'row' and 'vocab' are known"),
    ({"col": "*.gat"}, "tensor_parallel: col: *.gat: no module has such a name"),
    ({"col": "*.norm"}, "tensor_parallel: col: blocks.0.norm is LayerNorm, no nn.Linear"),
    ({"col": "out"}, "tensor_parallel: col: out.weight is (33, 8), not divisible by 2 along 0"),
    ({"row": "*.down"}, "[12, 12] X [6, 8].; is a col or a row missing in tensor_parallel?"),
    ({"col": ["*.gate", "*.up"]}, "[12, 6] X [12, 8].; is a col or a row missing in tensor_parallel?"),
    ({"row": "*.0.gate"}, "[12, 8] X [4, 12].; is a col or a row missing in tensor_parallel?"),
]


def test_a_table_that_makes_no_sense_is_one_line() -> None:
    for said in run_ranks(refused, 2, [table for table, _ in REFUSED]):
        for line, (_, end) in zip(said, REFUSED, strict=True):
            assert line.endswith(end) and "\n" not in line


def test_layers_that_are_not_cut_are_refused_under_tensor_parallelism() -> None:
    mesh = ParallelMesh.build(rank=0, size=2, tp=2)
    with pytest.raises(ConfigError, match="mesh: tp=2: modules of your own are not cut; make it 1, or"):
        Pipeline([nn.Linear(2, 2)], loss=loss, example=torch.empty(1, 2), mesh=mesh)
