"""`--model-module` with packed documents and with ranks that share sequences: a plain loop with a mask of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence import own_models
from megalite.comm import Axis, ContextAxes, ParallelMesh, World
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.library import Pipeline, Sequences, ShardedOptimizer, layers_from_module, layers_over, read_weights
from megalite.testing import run_ranks
from megalite.train import run_training
from megalite.train.run_data import open_data, resolve_tokenizer

FILE = Path(own_models.__file__)
STEPS, RATE, SAMPLES, LENGTH = 3, 0.5, 4, 16
BASE = (
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {SAMPLES} --train-iters {STEPS} --eval-iters 0 "
    "--device cpu --num-workers 0 --mock-data --vocab-size 6 --fp64 --no-exit-signal-handler --log-interval 1 "
    f"--optimizer sgd --sgd-momentum 0 --lr {RATE} --lr-decay-style constant --clip-grad 0 --weight-decay 0 "
)
DOCUMENTS = "--reset-attention-mask"
CP, AGAIN = "--context-parallel-size", "--recompute-granularity full"
LLAMA = (
    "--tensor-parallel-globs col:*.q_proj col:*.k_proj col:*.v_proj col:*.gate_proj col:*.up_proj row:*.o_proj "
    "row:*.down_proj vocab:model.embed_tokens vocab:lm_head "
)


def argv_of(name: str, *flags: str) -> list[str]:
    return " ".join([BASE, f"--model-module {FILE}:{name}", *flags]).split()


def trained(world: World, argv: list[str]) -> None:
    assert run_training(parse(argv, world_size=world.size), world) == 0


def batches(argv: list[str]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(Tokens, labels, who sees whom `[b, 1, s, s]`) of each step."""
    config, tokenizer = resolve_tokenizer(parse(argv))
    data = open_data(config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
    loader, found = data.train_loader(0), []
    for _ in range(STEPS):
        batch = loader.next_batch(SAMPLES)
        tokens, labels = (torch.cat([getattr(mb, name) for mb in batch]) for name in ("tokens", "labels"))
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(SAMPLES, 1, -1, -1)
        if batch[0].document_starts is not None:
            documents = torch.cat([mb.document_starts for mb in batch if mb.document_starts is not None])
            assert documents.max() > 0, "no sample has two documents"
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        found.append((tokens, labels, seen))
    return found


def logits_of(module: nn.Module, tokens: Tensor, seen: Tensor) -> Tensor:
    if not isinstance(module, nn.Sequential):
        at = torch.arange(LENGTH)
        near = at[:, None] - at < 4  # the window of gemma3
        kinds = {"full_attention": seen, "sliding_attention": seen & near}
        masks: Any = kinds if "Gemma3" in type(module).__name__ else seen
        out: Tensor = module(tokens, attention_mask=masks).logits
        return out
    for part in module:
        if isinstance(part, own_models.Attending):
            part.mask = seen
    found: Tensor = module(tokens)
    return found


def plain_loop(name: str, argv: list[str]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(parse(argv).training.seed)
    module: nn.Module = getattr(own_models, name)(**sizes(name)).double()
    losses = []
    for tokens, labels, seen in batches(argv):
        module.zero_grad()
        loss = nn.functional.cross_entropy(logits_of(module, tokens, seen).flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(float(loss))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
    return losses, module


def sizes(name: str) -> dict[str, Any]:
    return dict(vocab_size=6, seq_length=LENGTH) if name in ("attending", "gpt2") else dict(vocab_size=6)


def check(tmp_path: Path, name: str, ranks: int, flags: str, close: float = 1e-12) -> None:
    argv = argv_of(name, flags)
    run_ranks(trained, ranks, [*argv, "--save", str(tmp_path)])
    losses, module = plain_loop(name, argv_of(name, DOCUMENTS if DOCUMENTS in flags else ""))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["lm_loss"] for line in lines if line["kind"] == "train"] == pytest.approx(losses, rel=0, abs=1e-12)
    found = read_weights(tmp_path)
    for key, tensor in module.named_parameters():
        torch.testing.assert_close(found[key], tensor.detach(), rtol=0, atol=close)


def test_documents_and_shared_sequences_are_the_plain_loop(tmp_path: Path) -> None:
    check(tmp_path, "attending", 2, f"{DOCUMENTS} {CP} 2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("attending", 1, DOCUMENTS),
        ("attending", 2, f"{CP} 2"),
        ("attending", 2, f"{CP} 2 --cp-comm-type all_gather"),
        ("attending", 2, f"{CP} 2 --cp-comm-type a2a {DOCUMENTS}"),
        ("attending", 4, f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 {DOCUMENTS}"),
        ("attending", 4, f"{CP} 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 {DOCUMENTS} {AGAIN}"),
        ("llama", 2, f"{CP} 2 {DOCUMENTS}"),
        ("llama", 4, f"{CP} 2 {DOCUMENTS} --tensor-model-parallel-size 2 {LLAMA}"),
        ("gpt2", 2, f"{CP} 2 {DOCUMENTS} --zero-stage 3"),
    ],
)
def test_so_they_are_at_any_layout(tmp_path: Path, name: str, ranks: int, flags: str) -> None:
    check(tmp_path, name, ranks, flags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "flags", "close"),
    [
        ("gemma3", 2, f"{CP} 2", 1e-8),  # its norms compute in fp32
        ("gemma3", 2, f"{CP} 2 {DOCUMENTS}", 1e-8),
        ("qwen3_moe", 2, f"{CP} 2 {DOCUMENTS}", 1e-9),
        ("deepseek3", 1, DOCUMENTS, 1e-9),
        ("olmo2", 2, f"{CP} 2 {DOCUMENTS}", 1e-12),
    ],
)
def test_windows_and_experts_are_kept(tmp_path: Path, name: str, ranks: int, flags: str, close: float) -> None:
    check(tmp_path, name, ranks, flags, close)


def by_library(world: World, argv: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, cp=2)
    torch.manual_seed(parse(argv).training.seed)
    tokens = torch.empty(SAMPLES, LENGTH, dtype=torch.int64, device="meta")
    module = own_models.attending(6, LENGTH).double()
    layers = layers_from_module(module, tokens, mesh=mesh, documents=True)
    pipe = Pipeline(layers, loss=mean_loss, example=tokens, mesh=mesh)
    optimizer = ShardedOptimizer(pipe, "sgd", lr=RATE, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0)
    losses = []
    for inputs, labels, seen in batches(argv):
        starts = seen[:, 0].int().argmax(-1)
        losses.append(pipe.step([((inputs, starts), labels), ((inputs, starts), labels)]).item())
        optimizer.step()
    return losses, optimizer.weights()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.in_turn
def test_the_library_knows_them_too() -> None:
    argv = argv_of("attending", DOCUMENTS)
    losses, module = plain_loop("attending", argv)
    for found, weights in run_ranks(by_library, 2, argv):
        assert found == pytest.approx(losses, rel=0, abs=1e-12)
        for key, tensor in module.named_parameters():
            torch.testing.assert_close(weights[key], tensor.detach(), rtol=0, atol=1e-12)


class Changed(nn.Module):
    """An attention that our core or a part of a sequence does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.table = kind, nn.Linear(8, 8), nn.Parameter(torch.zeros(2 * LENGTH, 8))
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)[:, None]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.kind == "eager":
            scores = (y @ y.transpose(2, 3)).masked_fill(~seen, -1e9).softmax(-1)
            return (scores @ y)[:, 0]
        settings: dict[str, Any] = {
            "all": {},
            "drops": {"is_causal": True, "dropout_p": 0.1},
            "odd": {"attn_mask": seen ^ torch.eye(x.shape[1], dtype=torch.bool).roll(3, 1).tril()},
            "bias": {"attn_mask": seen.float().log() - torch.arange(x.shape[1])},
            "input": {"attn_mask": seen & (x[..., :1] > 0)},
        }.get(self.kind, {"is_causal": True})
        y = nn.functional.scaled_dot_product_attention(y, y, y, **settings)[:, 0]
        if self.kind == "convolution":
            y = self.convolution(y.transpose(1, 2)).transpose(1, 2)
        if self.kind == "pairs":
            y = y.contiguous().view(len(x), -1, 16).sin().view_as(x)
        if self.kind == "table":
            y = y + self.table[: x.shape[1]]
        return y + y.cumsum(1) if self.kind == "sum" else y


REFUSED = [
    ("eager", "documents", "nothing calls torch's scaled_dot_product_attention"),
    ("all", "documents", "sees later tokens: give it is_causal=True"),
    ("drops", "documents", "drops weights (0.1)"),
    ("odd", "documents", "has a mask that is neither causal nor a sliding window"),
    ("bias", "documents", "adds numbers to its scores (a bias of positions)"),
    ("input", "documents", "has a mask that depends on the input"),
    ("sum", "documents", "cumsum works along 16 tokens"),
    ("pairs", "documents", "view makes [2, 8, 16] of [2, 16, 8], whose tokens it mixes"),
    ("eager", "ranks", "one dimension of tokens is wanted (is there a mask outside"),
    ("convolution", "ranks", "conv1d may mix tokens; beside attention each must be computed by itself"),
    ("table", "ranks", "slice takes rows by the number of tokens; look them up"),
    ("sum", "ranks", "cumsum works along 16 tokens; beside attention each must be computed by itself"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"), [("mamba2", "nothing calls torch's"), ("qwen3_next", "conv1d may mix tokens; beside attention")]
)
def test_layers_that_go_along_tokens_know_no_documents(name: str, text: str) -> None:
    tokens = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")
    with pytest.raises(ConfigError, match=text):
        layers_from_module(getattr(own_models, name)(6), tokens, documents=True)


@pytest.mark.parametrize(("kind", "what", "text"), REFUSED)
def test_what_has_no_such_form_is_refused(kind: str, what: str, text: str) -> None:
    cp = ContextAxes(ring=Axis("cp_ring", 2, 0, (0, 1))) if what == "ranks" else ContextAxes()
    module = nn.Sequential(nn.Embedding(5, 8), Changed(kind), nn.Linear(8, 5))
    tokens = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")
    with pytest.raises(ConfigError) as caught:
        layers_over(Axis.single("tp"), module, (tokens,), {}, Sequences(what == "documents", cp), ids=None)
    assert text in str(caught.value) and "\n" not in str(caught.value)
