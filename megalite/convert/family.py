"""A family of Hugging Face models: its config.json, and a rule for every layer's tensors.

A rule names a logical layer, the layers that it is on the other side, and the form in which the values stand there; it
holds for `.weight` and `.bias` alike. `{i}` is the number of a block, `{e}` of an expert. A rule counts where the model
has its logical tensor (a bias, an untied output), so a family lists all that it may have.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.convert.fields import Fields
from megalite.convert.source import stored_shapes
from megalite.inventory import WORD_EMBEDDINGS


@dataclass(frozen=True)
class TensorForm:
    """A rearrangement of values; `to_theirs` and `to_ours` are inverse to each other."""

    to_theirs: Callable[[ModelConfig, Tensor], list[Tensor]]
    to_ours: Callable[[ModelConfig, Sequence[Tensor]], Tensor]


def split_groups(model: ModelConfig, qkv: Tensor) -> list[Tensor]:
    """`[g * (r + 2) * d, ...]`, for each group r queries, key, value -> all queries, all keys, all values."""
    g, d = model.query_groups, model.head_dim
    rows = qkv.reshape(g, -1, d, *qkv.shape[1:])
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return [part.reshape(-1, *qkv.shape[1:]) for part in parts]


def join_groups(model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    g, d = model.query_groups, model.head_dim
    rows = [part.reshape(g, -1, d, *part.shape[1:]) for part in parts]
    return torch.cat(rows, 1).reshape(-1, *parts[0].shape[1:])


def reordered(rows: Tensor, channels: int, rotated: int, *, inwards: bool) -> Tensor:
    """`[n channels, ...]`, of each `channels` the last `rotated` in the other order: pairs of neighbours become two
    halves (`inwards`), or halves become neighbours."""
    kept, turned = rows.unflatten(0, (-1, channels)).split((channels - rotated, rotated), 1)
    turned = turned.unflatten(1, (-1, 2) if inwards else (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((kept, turned), 1).flatten(0, 1)


# The same tensor under another name.
SAME = TensorForm(lambda model, t: [t], lambda model, parts: parts[0])
# Matrices `[in, out]` there (GPT-2's Conv1D), `[out, in]` here.
TRANSPOSED = TensorForm(lambda model, t: [t.t()], lambda model, parts: parts[0].t())
# Several tensors there (gate and value, or those of all experts), one `[n, ...]` here.
STACKED = TensorForm(lambda model, t: list(t.unbind()), lambda model, parts: torch.stack(list(parts)))
# Queries, keys, values: three tensors there, rows grouped by key/value head here.
GROUPED = TensorForm(split_groups, join_groups)
# The same, but one tensor there, which they share side by side in the last dimension (GPT-2's c_attn).
GROUPED_TRANSPOSED = TensorForm(
    lambda model, qkv: [torch.cat(split_groups(model, qkv)).movedim(0, -1)],
    lambda model, parts: join_groups(
        model, parts[0].movedim(-1, 0).split([model.query_size, model.kv_size, model.kv_size])
    ),
)


@dataclass(frozen=True)
class LayerRule:
    """The layer `ours` is `theirs` in `form`; both without `.weight` or `.bias`, or one tensor by its whole names. A
    name with `{e}` stands for a tensor of each expert, in their order."""

    ours: str
    theirs: tuple[str, ...]
    form: TensorForm = SAME


BLOCK, THERE = "layers.{i}.", "model.layers.{i}."


@dataclass(frozen=True)
class Renamed:
    """Rules of layers in one form, whose names here and there stand behind `ours` and `theirs`."""

    names: Mapping[str, str | tuple[str, ...]]
    theirs: str = THERE
    form: TensorForm = SAME
    ours: str = BLOCK

    def __iter__(self) -> Iterator[LayerRule]:
        for mine, name in self.names.items():
            there = (name,) if isinstance(name, str) else name
            yield LayerRule(self.ours + mine, tuple(self.theirs + each for each in there), self.form)


@dataclass(frozen=True)
class TensorPair:
    """The logical tensor `ours` is the tensors `theirs` in `form`."""

    ours: str
    theirs: tuple[str, ...]
    form: TensorForm
    copies: tuple[str, ...] = ()  # other names that it may have there, too

    def parts(self, model: ModelConfig, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes there. shape: here."""
        like = self.form.to_theirs(model, torch.empty(shape, device="meta"))  # where it costs nothing
        return [(name, tuple(part.shape)) for name, part in zip(self.theirs, like, strict=True)]


@dataclass(frozen=True)
class HuggingFaceFamily:
    """A `model_type` of config.json."""

    name: str
    architecture: str  # transformers' class
    rules: tuple[LayerRule, ...]
    read: Callable[[Fields], ModelConfig]  # config.json; raises ConfigError
    write: Callable[[ModelConfig], Mapping[str, Any]]  # config.json's entries of the shape
    predicts: bool = False  # whether files may have layers behind the last one, which predict further tokens
    stacked: tuple[LayerRule, ...] = ()  # rules of files that have all experts of a layer in one tensor
    prefix: str = "model."  # what some files leave out in front of the names of all but the output
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # endings of stored buffers that transformers computes anew

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """What config.json says of it."""
        return {"architectures": [self.architecture], "model_type": self.name, **self.write(model)}

    def pairs(self, model: ModelConfig) -> Iterator[TensorPair]:
        """Every tensor of this model, in its order."""
        rules = {rule.ours: rule for rule in self.rules}
        for name in stored_shapes(model):
            index, whole = "", name
            further = re.fullmatch(r"head\.mtp\.layers\.(\d+)\.(block\.)?(.*)", name)
            if further is not None:  # behind the last layer there
                index = str(model.num_layers + int(further[1]))
                name = ("layers.{i}." if further[2] else "mtp.{i}.") + further[3]
            elif name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                name = "layers.{i}." + rest
            layer, dot, kind = (name, "", "") if name in rules else name.rpartition(".")
            theirs = [(there + dot + kind).replace("{i}", index) for there in rules[layer].theirs]
            if any("{e}" in there for there in theirs):
                experts = range(model.experts.num_experts or 1)
                theirs = [there.replace("{e}", str(e)) for e in experts for there in theirs]
            yield TensorPair(whole, tuple(theirs), rules[layer].form, self._copies(model, whole))

    def _copies(self, model: ModelConfig, name: str) -> tuple[str, ...]:
        """Embedding and output layer stand again beside every further prediction."""
        layers = range(model.num_layers, model.num_layers + model.further.depth)
        copy = {WORD_EMBEDDINGS: "embed_tokens", "head.output.weight": "shared_head.head"}.get(name)
        return () if copy is None else tuple(f"model.layers.{layer}.{copy}.weight" for layer in layers)
