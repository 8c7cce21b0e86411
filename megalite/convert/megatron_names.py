"""Megatron-LM's names and cuts: where a logical tensor is in its files, and how ranks share it.

    mp_rank_01_000       rank 1 of tensor parallelism, stage 0: layers count from 0 in every (virtual) stage
    mp_rank_01_000_002   the same, expert rank 2: of each block its third part of the experts

Three names for everything: the models before megatron.core (`legacy`), megatron.core with torch's layers (`local`), and
with Transformer Engine's, whose linear layers hold the norm before them (`transformer_engine`). Experts:

    mlp.experts.local_experts.3.linear_fc1.weight   one after the other (`local`): as in a dense MLP
    mlp.experts.linear_fc1.weight3                  Transformer Engine's grouped layers: the same, numbered behind
    mlp.experts.weight1, weight2                    megatron.core's own grouped layers: all in one, each [in, out]

The router is whole in every file, the shared expert is cut like a dense MLP: they are among `RULES`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.config import ModelConfig

IMPLEMENTATIONS = ("transformer_engine", "local", "legacy")


@dataclass(frozen=True)
class RankCut:
    """A cut of values over tensor-parallel ranks; `to_ours` is the inverse of `to_theirs`."""

    to_theirs: Callable[[ModelConfig, Tensor, int], Sequence[Tensor]]
    to_ours: Callable[[ModelConfig, Sequence[Tensor]], Tensor]


def _padded_rows(model: ModelConfig, values: Tensor, ranks: int) -> Sequence[Tensor]:
    padding = model.padded_vocab_size(ranks) - model.vocab_size
    return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]).chunk(ranks)


# The same values on every rank.
WHOLE = RankCut(lambda model, t, ranks: [t] * ranks, lambda model, parts: parts[0])
# Rows; queries, keys and values too, since their rows are grouped by key/value head on both sides.
ROWS = RankCut(lambda model, t, ranks: t.chunk(ranks), lambda model, parts: torch.cat(list(parts)))
# Rows of the vocabulary, padded with zeros until all ranks have the same number.
VOCABULARY = RankCut(_padded_rows, lambda model, parts: torch.cat(list(parts))[: model.vocab_size])
# Columns; the bias is whole.
COLUMNS = RankCut(
    lambda model, t, ranks: [t] * ranks if t.dim() == 1 else t.chunk(ranks, 1),
    lambda model, parts: parts[0] if parts[0].dim() == 1 else torch.cat(list(parts), 1),
)
# `[2, f, ...]` -> on every rank its gates above its values, `[2 f / ranks, ...]`; rows where there are no gates.
GATED_ROWS = RankCut(
    lambda model, t, ranks: [each.flatten(0, 1) for each in t.chunk(ranks, 1)] if model.gated else t.chunk(ranks),
    lambda model, parts: torch.cat([t.unflatten(0, (2, -1)) for t in parts], 1) if model.gated else torch.cat([*parts]),
)


@dataclass(frozen=True)
class MegatronRule:
    """The logical layer `ours` under Megatron's names, each with what stands before `weight` or `bias`; `{i}` is the
    number of a block."""

    ours: str
    legacy: str
    local: str
    transformer_engine: str = ""
    cut: RankCut = WHOLE
    older: tuple[str, ...] = ()  # names of earlier releases, only read

    def written(self, implementation: str, sparse: bool) -> str:
        """The name in files for `implementation`; empty where it has no such layer. sparse: the block has experts, so
        the norm before them is in no linear layer."""
        if implementation == "legacy":
            return self.legacy
        alone = implementation != "transformer_engine" or (sparse and self.ours.endswith(".mlp_norm"))
        return self.local if alone else self.transformer_engine or self.local


ENCODER, DECODER = "language_model.encoder.", "decoder."
BLOCK, CORE = ENCODER + "layers.{i}.", DECODER + "layers.{i}."

RULES = (
    MegatronRule(
        "embedding.word_embeddings", "language_model.embedding.word_embeddings.", "embedding.word_embeddings.",
        cut=VOCABULARY,
    ),
    MegatronRule(
        "embedding.position_embeddings", "language_model.embedding.position_embeddings.",
        "embedding.position_embeddings.",
    ),
    MegatronRule(
        "layers.{i}.input_norm", BLOCK + "input_norm.", CORE + "input_layernorm.",
        CORE + "self_attention.linear_qkv.layer_norm_", older=(BLOCK + "input_layernorm.",),
    ),
    MegatronRule(
        "layers.{i}.attention.qkv", BLOCK + "self_attention.query_key_value.", CORE + "self_attention.linear_qkv.",
        cut=ROWS,
    ),
    MegatronRule("layers.{i}.attention", "", CORE + "self_attention.core_attention.", cut=ROWS),
    MegatronRule("layers.{i}.attention.q_norm", "", CORE + "self_attention.q_layernorm."),
    MegatronRule("layers.{i}.attention.k_norm", "", CORE + "self_attention.k_layernorm."),
    MegatronRule(
        "layers.{i}.attention.proj", BLOCK + "self_attention.dense.", CORE + "self_attention.linear_proj.", cut=COLUMNS
    ),
    MegatronRule(
        "layers.{i}.mlp_norm", BLOCK + "post_attention_norm.", CORE + "pre_mlp_layernorm.",
        CORE + "mlp.linear_fc1.layer_norm_", older=(BLOCK + "post_attention_layernorm.",),
    ),
    MegatronRule("layers.{i}.mlp.fc1", BLOCK + "mlp.dense_h_to_4h.", CORE + "mlp.linear_fc1.", cut=GATED_ROWS),
    MegatronRule("layers.{i}.mlp.fc2", BLOCK + "mlp.dense_4h_to_h.", CORE + "mlp.linear_fc2.", cut=COLUMNS),
    MegatronRule("layers.{i}.mlp.router", "", CORE + "mlp.router."),
    MegatronRule("layers.{i}.mlp.shared_experts.fc1", "", CORE + "mlp.shared_experts.linear_fc1.", cut=GATED_ROWS),
    MegatronRule("layers.{i}.mlp.shared_experts.fc2", "", CORE + "mlp.shared_experts.linear_fc2.", cut=COLUMNS),
    MegatronRule(
        "head.final_norm", ENCODER + "final_norm.", DECODER + "final_layernorm.", older=(ENCODER + "final_layernorm.",)
    ),
    MegatronRule(
        "head.output", "language_model.output_layer.", "output_layer.",
        cut=VOCABULARY, older=("word_embeddings_for_head.",),
    ),
)  # fmt: skip

# Tied embeddings: the last of several stages holds a copy of the first one's.
COPY = {"legacy": "word_embeddings_for_head.weight", "local": "output_layer.weight"}
KINDS = ("weight", "bias", "expert_bias", "softmax_offset")
# Buffers that are computed anew.
IGNORED = ("_extra_state", "inv_freq", "local_tokens_per_expert")


def rule_of(ours: str) -> MegatronRule:
    """The rule of a logical tensor."""
    template = re.sub(r"^layers\.\d+", "layers.{i}", ours.rpartition(".")[0])
    return next(rule for rule in RULES if rule.ours == template)


def name_of(ours: str, implementation: str, layer: int, *, sparse: bool) -> str:
    """The name of a logical tensor in the file of its stage, where its block is number `layer`; sparse: has experts."""
    return rule_of(ours).written(implementation, sparse).replace("{i}", str(layer)) + ours.rsplit(".", 1)[1]


def megatron_names() -> Mapping[str, str]:
    """Every name in a file -> its logical tensor's, both with `{i}`."""
    table: dict[str, str] = {}
    for rule in RULES:
        for before in filter(None, (rule.legacy, rule.local, rule.transformer_engine, *rule.older)):
            table |= {before + kind: f"{rule.ours}.{kind}" for kind in KINDS}
    return table


def plain_name(name: str) -> str:
    """A name of the oldest releases as later ones write it."""
    name = name.removeprefix("module.")
    if name.startswith("language_model."):
        name = re.sub(r"^language_model\.transformer\.", ENCODER, name).replace(".attention.", ".self_attention.")
    return name


def untangle(model: ModelConfig, qkv: Tensor, version: float) -> Tensor:
    """Rows of q, k and v as files of version 2 and later have them: for every head q, k, v of its channels.

    Version 0 holds all q, then all k, then all v of a rank; version 1 holds q, k, v of every channel side by side.
    """
    if version >= 2:
        return qkv
    rest, d = qkv.shape[1:], model.head_dim
    if version == 0:
        return qkv.reshape(3, -1, d, *rest).transpose(0, 1).reshape(-1, *rest)
    return qkv.reshape(-1, d, 3, *rest).transpose(1, 2).reshape(-1, *rest)


EXPERT = re.compile(
    r"decoder\.layers\.(?P<layer>\d{1,6})\.mlp\.experts\."
    r"(?:local_experts\.(?P<alone>\d{1,4})\.linear_(?P<one>fc[12])\.(?P<kind>weight|bias)"
    r"|linear_(?P<many>fc[12])\.(?P<form>weight|bias)(?P<number>\d{1,4})"
    r"|weight(?P<all>[12]))",
    re.ASCII,
)
WRITTEN = {
    "local": "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_{part}.{kind}",
    "transformer_engine": "decoder.layers.{i}.mlp.experts.linear_{part}.{kind}{e}",
}


def expert_of(name: str) -> tuple[int, str, int | None] | None:
    """Of an expert's tensor in a file: number of its layer within the file, what it is (`fc1.weight`), number of the
    expert within the file (None: all in one). None: no expert's."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    if match["all"]:
        return int(match["layer"]), f"fc{match['all']}.weight", None
    what = f"{match['one'] or match['many']}.{match['kind'] or match['form']}"
    return int(match["layer"]), what, int(match["alone"] or match["number"])


@dataclass(frozen=True)
class Location:
    """The place of a part of a tensor."""

    path: Path
    name: str  # in that file
    at: tuple[int, ...]  # of one rank's file the virtual stage, of a whole tensor leading indices, not in its shape
    entry: tuple[str, tuple[int, ...]]  # dtype and shape


Apart = Callable[[ModelConfig, Tensor, int], Iterable[Tensor]]
# What takes the experts of a rank apart, all in one tensor: `weight1` `[h, n up]`, which is `[n, h, up]` in memory, and
# `weight2` `[n f, h]`.
APART: Mapping[str, Apart] = {
    "fc1": lambda model, t, n: t.reshape(n, model.hidden_size, -1).mT,
    "fc2": lambda model, t, n: t.reshape(n, -1, model.hidden_size).mT,
}


@dataclass
class Parts:
    """A logical tensor in files: of each expert (of a dense layer once) its parts, of one tensor rank each."""

    ours: str
    first: Location  # one of them, for messages
    places: list[list[Location]]
    halves: bool = False  # whether the parts are the gates and the values of one rank
    apart: Apart | None = None  # where the parts hold several experts, as many each

    def join(self, model: ModelConfig, read: Callable[[Location], Tensor]) -> Tensor:
        """The logical tensor; experts are `[E, ...]`. Raises RuntimeError, IndexError or ValueError where the parts do
        not fit."""
        found = []
        for places in self.places:
            values = [read(place) for place in places]
            number = (model.experts.num_experts or 1) // len(self.places)
            each = [[value] if self.apart is None else self.apart(model, value, number) for value in values]
            for parts in zip(*each, strict=True):
                found.append(cut_of(self.ours).to_ours(model, [torch.cat(parts)] if self.halves else parts))
        return torch.stack(found) if is_expert(self.ours) else found[0]


def cut_of(ours: str) -> RankCut:
    """The cut of a logical tensor, or of one expert's, over ranks."""
    if is_expert(ours):
        return GATED_ROWS if ours.split(".")[4] == "fc1" else COLUMNS
    return rule_of(ours).cut


def is_expert(ours: str) -> bool:
    """Whether a logical tensor holds experts."""
    return ".mlp.experts." in ours


def written_experts(
    model: ModelConfig, ours: str, values: Tensor, implementation: str, layer: int, expert: tuple[int, int],
    tensor: tuple[int, int],
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Names and values in the file of an expert rank and an expert-tensor rank, each (number, how many)."""
    part, kind = ours.rsplit(".", 2)[1:]
    for number, one in enumerate(values.chunk(expert[1])[expert[0]]):
        name = WRITTEN[implementation].format(i=layer, part=part, kind=kind, e=number)
        yield name, cut_of(ours).to_theirs(model, one, tensor[1])[tensor[0]]


def stateful_layers(model: ModelConfig, *, sparse: bool) -> list[str]:
    """Layers of a block that miss an extra state in Transformer Engine's file; it has nothing in it."""
    shared = model.experts.moe_shared_expert_intermediate_size is not None
    owners = ("mlp.experts", "mlp.shared_experts")[: 1 + shared] if sparse else ("mlp",)
    attention = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    return attention + [f"{owner}.linear_{part}" for owner in owners for part in ("fc1", "fc2")]
