"""Megatron-LM's experts: their settings in `args`, and how a file names and cuts those of its rank.

    mp_rank_01_000_002   tensor rank 1, stage 0, expert rank 2: of each block its third part of the experts

    mlp.experts.local_experts.3.linear_fc1.weight   one after the other (`local`): as in a dense MLP
    mlp.experts.linear_fc1.weight3                  Transformer Engine's grouped layers: the same, numbered behind
    mlp.experts.weight1, weight2                    megatron.core's own grouped layers: all in one, each [in, out]

The router is whole in every file, the shared expert is cut like a dense MLP: their rules are `megatron.RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megalite.config import Experts, ModelConfig, pattern_text
from megalite.convert.fields import Fields
from megalite.convert.megatron_cuts import COLUMNS, GATED_ROWS, RankCut

MOST_EXPERTS = 4096
Location = TypeVar("Location")
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
# What changes the function of a sparse block in a way that we do not have -> the values that leave it as it is.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "moe_expert_capacity_factor": (None,),  # there it drops tokens in evaluation too
    "moe_shared_expert_gate": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_router_topk_limited_devices": (None,),
    "moe_latent_size": (None,),
}
BALANCING = {"aux_loss": "aux_loss", "seq_aux_loss": "seq_aux_loss", "none": "none"}
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class ExpertName:
    """What a name in a file is: logical layer (its number counts within the file), weight or bias, which expert of the
    file (None: all in one)."""

    layer: int
    part: str
    kind: str
    number: int | None

    @classmethod
    def of(cls, name: str) -> ExpertName | None:
        """None: no expert's."""
        match = EXPERT.fullmatch(name)
        if match is None:
            return None
        layer = int(match["layer"])
        if match["all"]:
            return cls(layer, f"fc{match['all']}", "weight", None)
        number = match["alone"] or match["number"]
        return cls(layer, match["one"] or match["many"], match["kind"] or match["form"], int(number))


@dataclass
class ExpertParts(Generic[Location]):
    """A logical tensor of experts in files: of each expert rank, expert by expert, its parts over tensor ranks.

    whole: all experts of a rank in one tensor.
    """

    part: str
    whole: bool
    ranks: list[list[list[Location]]] = field(default_factory=list)

    def join(self, model: ModelConfig, read: Callable[[Location], Tensor]) -> Tensor:
        """The logical tensor, `[E, ...]`. Raises RuntimeError or IndexError where the parts do not fit."""
        cut, found = cut_of(self.part), []
        for experts in self.ranks:
            for places in experts:
                parts = [read(place) for place in places]
                found.append(self._split(model, parts) if self.whole else cut.to_ours(model, parts)[None])
        return torch.cat(found)

    def _split(self, model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
        """`weight1` `[h, n up]`, which is `[n, h, up]` in memory, or `weight2` `[n f, h]`."""
        number, h = (model.experts.num_experts or 1) // len(self.ranks), model.hidden_size
        if self.part == "fc1":
            rows = [part.reshape(number, h, -1).mT for part in parts]
            return torch.cat([r.unflatten(1, (2, -1)) for r in rows], 2) if model.gated else torch.cat(rows, 1)
        return torch.cat([part.reshape(number, -1, h).mT for part in parts], 2)


def cut_of(part: str) -> RankCut:
    """How expert-tensor-parallel ranks share an expert's layer."""
    return GATED_ROWS if part == "fc1" else COLUMNS


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
        yield name, cut_of(part).to_theirs(model, one, tensor[1])[tensor[0]]


def extra_states(model: ModelConfig) -> tuple[str, ...]:
    """Of a sparse block's layers in Transformer Engine's file, after `mlp.`."""
    shared = model.experts.moe_shared_expert_intermediate_size is not None
    return tuple(
        f"{owner}.linear_{part}" for owner in ("experts", "shared_experts")[: 1 + shared] for part in ("fc1", "fc2")
    )


def read_experts(fields: Fields, legacy: bool) -> Experts:
    """The entries of `args` about experts. Raises ConfigError for what we do not have."""
    number = fields.get("num_experts")
    if number is None or (type(number) is int and number == 0):
        return Experts()
    if legacy:
        raise fields.wrong("num_experts", number, "not supported with the names before megatron.core")
    if type(number) is not int or not 2 <= number <= MOST_EXPERTS:
        raise fields.wrong("num_experts", number, f"not supported (2 to {MOST_EXPERTS})")
    for key, allowed in REFUSED.items():
        fields.only(key, *allowed)

    def whole(key: str) -> int | None:
        return None if fields.get(key) is None else fields.integer(key)

    def coefficient(key: str) -> float:
        return fields.number(key) if fields.get(key, 0) != 0 else 0.0

    biased = fields.flag("moe_router_enable_expert_bias", False)
    scaling = fields.get("moe_router_topk_scaling_factor")
    return Experts(
        num_experts=number,
        moe_router_topk=fields.integer("moe_router_topk", 2),
        moe_ffn_hidden_size=whole("moe_ffn_hidden_size"),
        moe_layer_freq=_frequency(fields),
        moe_shared_expert_intermediate_size=whole("moe_shared_expert_intermediate_size"),
        moe_router_load_balancing_type=fields.choice("moe_router_load_balancing_type", BALANCING, "aux_loss"),
        moe_aux_loss_coeff=coefficient("moe_aux_loss_coeff"),
        moe_z_loss_coeff=coefficient("moe_z_loss_coeff"),
        moe_router_score_function=fields.choice("moe_router_score_function", SCORES, "softmax"),
        moe_router_pre_softmax=fields.flag("moe_router_pre_softmax", False),
        moe_router_num_groups=whole("moe_router_num_groups"),
        moe_router_group_topk=whole("moe_router_group_topk"),
        moe_router_topk_scaling_factor=None if scaling is None else fields.number("moe_router_topk_scaling_factor"),
        moe_router_enable_expert_bias=biased,
        moe_router_bias_update_rate=coefficient("moe_router_bias_update_rate") if biased else 1e-3,
    )


def _frequency(fields: Fields) -> str:
    """A number, or a list of 0 and 1 for each layer."""
    value, layers = fields.get("moe_layer_freq", 1), fields.integer("num_layers")
    if type(value) is int and value > 0:
        return str(value)
    if not isinstance(value, list) or len(value) != layers or any(entry not in (0, 1) for entry in value):
        raise fields.wrong("moe_layer_freq", value, f"is not a number, nor a list of {layers} of 0 and 1")
    if not any(value):
        raise fields.wrong("moe_layer_freq", value, "leaves no layer with experts")
    return pattern_text(map(bool, value))


def write_experts(model: ModelConfig, implementation: str) -> dict[str, Any]:
    """The entries of `args` about experts."""
    given = model.experts
    if given.num_experts is None:
        return {"num_experts": None}
    return {
        "num_experts": given.num_experts,
        "moe_router_topk": given.moe_router_topk,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_layer_freq": [int(sparse) for sparse in model.sparse_layers],
        "moe_shared_expert_intermediate_size": given.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": False,
        "moe_router_load_balancing_type": given.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": given.moe_aux_loss_coeff,
        "moe_z_loss_coeff": given.moe_z_loss_coeff or None,
        "moe_expert_capacity_factor": None,
        "moe_router_score_function": given.moe_router_score_function,
        "moe_router_pre_softmax": given.moe_router_pre_softmax,
        "moe_router_num_groups": given.moe_router_num_groups,
        "moe_router_group_topk": given.moe_router_group_topk,
        "moe_router_topk_scaling_factor": given.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": given.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": given.moe_router_bias_update_rate,
        "moe_grouped_gemm": implementation == "transformer_engine",
    }


def check_expert_cut(model: ModelConfig, tensor: int, experts: int, within: int) -> list[str]:
    """What keeps Megatron-LM from cutting a model's experts over `experts` x `within` ranks, beside tensor parallelism
    of `tensor`: lines."""
    number, ep, etp = (
        model.experts.num_experts,
        "--target-expert-model-parallel-size",
        "--target-expert-tensor-parallel-size",
    )
    if number is None:
        found = [(ep, experts, 1), (etp, within, tensor)]
        return [f"{flag}={size}: the model has no experts; drop it" for flag, size, usual in found if size != usual]
    problems = []
    if experts < 1 or number % experts:
        problems.append(f"{ep}={experts}: does not divide {number} experts")
    if within not in (1, tensor):
        problems.append(f"{etp}={within}: neither 1 nor --target-tensor-model-parallel-size={tensor}")
    elif model.expert_ffn_size % within:
        problems.append(f"{etp}={within}: does not divide {model.expert_ffn_size} channels of an expert")
    shared = model.experts.moe_shared_expert_intermediate_size
    if shared is not None and tensor > 0 and shared % tensor:
        flag = "--target-tensor-model-parallel-size"
        problems.append(f"{flag}={tensor}: does not divide {shared} channels of the shared expert")
    return problems
