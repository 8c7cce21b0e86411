"""Adapters: low-rank ones beside linear layers (LoRA, arXiv 2106.09685), and layers of their own: which there are, and
what they consist of."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from megalite.config import ModelConfig
from megalite.inventory.parameter import Parameter
from megalite.inventory.parameter_placement import Shape


@dataclass(frozen=True)
class Adapter:
    """A low-rank product beside some outputs of a linear layer (LoRA, arXiv 2106.09685): y += scale * (x A^T) B^T.

    Of experts (A `[E, R, in]`, B `[E, ..., out, R]`) each has its own pair, or all have one A, `[1, R, in]`.

    rows: outputs are units of `width` (None: as many as make `units`), and of every `units` in a row it adds to those
    from `begin` to `end`. a: `[R, in]`. b: `[..., its outputs, R]`, zero at first.
    """

    name: str
    a: Parameter
    b: Parameter
    units: int = 1
    begin: int = 0
    end: int = 1
    width: int | None = None


def adapters_of(model: ModelConfig, linear: str) -> list[Adapter]:
    """The adapters of a linear layer of a block, `attention.qkv` for example. The rows of queries, keys and values are
    grouped by key/value head (`nn.attention.layer`); those of each are in the order of heads.

    A rank that holds a part of an adapter has seen a part of the gradient of what is whole there; of an A that experts
    share, those of its own."""
    h, f, q, kv, d = model.hidden_size, model.ffn_size, model.query_size, model.kv_size, model.head_dim
    number, experts = model.experts.num_experts, linear.startswith("mlp.experts.")
    if experts:
        f = model.expert_ffn_size if number is not None else 0
    elif linear.startswith("mlp.") and number is not None:
        f = (model.experts.moe_shared_expert_intermediate_size or 0) if "shared_experts." in linear else 0
    r = model.num_attention_heads // model.query_groups
    places: dict[str, dict[str, tuple[Shape, tuple[int, ...]]]] = {
        "attention.qkv": {
            "qkv": ((q + 2 * kv,), ()),
            "q": ((q,), (r + 2, 0, r, d)),
            "k": ((kv,), (r + 2, r, r + 1, d)),
            "v": ((kv,), (r + 2, r + 1, r + 2, d)),
        },
        "attention.proj": {"proj": ((h,), ())},
        "mlp.fc1": {
            "fc1": ((2, f) if model.gated else (f,), ()),
            "gate": ((f,), (2, 0, 1)),
            "up": ((f,), (2, 1, 2)),
        },
        "mlp.fc2": {"fc2": ((h,), ())},
    }
    kind = linear.replace("shared_experts.", "").replace(".experts.", ".")
    row_parallel, columns = kind in ("attention.proj", "mlp.fc2"), {"attention.proj": q, "mlp.fc2": f}.get(kind, h)
    rank, shared, stack = model.lora.lora_rank or 1, model.lora.lora_shared_a, (number or 1,) if experts else ()
    family, found = "expert" if experts else "adapter", []
    for part, (rows, place) in places.get(kind, {}).items() if f else ():
        if part in model.adapted_parts:
            name = f"{linear}.adapters.{part}.lora_"
            a_shape = (*((1,) if experts and shared else stack), rank, columns)
            b_shape = (*stack, *rows, rank)
            a_cut, b_cut = (len(a_shape) - 1, None) if row_parallel else (None, len(b_shape) - 2)
            a_seen, b_seen = ("", "heads") if row_parallel else ("heads", "")
            std = 1 / math.sqrt(3 * columns)  # the deviation of peft's uniform numbers
            dealt = experts and not shared
            a = Parameter(f"{name}a", a_shape, a_cut, partial=a_seen, init_std=std, family=family, dealt=dealt)
            b = Parameter(f"{name}b", b_shape, b_cut, partial=b_seen, family=family, dealt=experts)
            found.append(Adapter(part, a, b, *place))
    return found


def bottlenecks(model: ModelConfig) -> Iterator[Parameter]:
    """Of a block: behind its attention and its MLP each y += up(gelu(down(y))), whole on every tensor-parallel rank."""
    h, width, std = model.hidden_size, model.lora.lora_rank or 1, model.init_method_std
    for behind in ("attention", "mlp") if "bottleneck" in model.adapted_parts else ():
        for part, shape, start in (("down", (width, h), std), ("up", (h, width), None)):
            name = f"adapters.{behind}.{part}"
            yield Parameter(f"{name}.weight", shape, partial="sequence", init_std=start, family="adapter")
            yield Parameter(f"{name}.bias", shape[:1], partial="sequence", decay=False, family="adapter")


def prefixes(model: ModelConfig) -> list[Parameter]:
    """Of an attention: keys and values `[2, P, h_kv]`, cut by heads."""
    shape, std = (2, model.lora.prefix, model.kv_size), model.init_method_std
    return [Parameter("attention.adapters.prefix", shape, 2, init_std=std, family="adapter")] if shape[1] else []


def held_in_8_bits(model: ModelConfig, name: str) -> bool:
    """Whether a parameter of a block (`mlp.fc1.weight`) is in 8 bits: the matrices of its linear layers are."""
    return model.lora.frozen_weights_int8 and name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"))


def with_adapters(parameters: Iterable[Parameter], model: ModelConfig) -> Iterator[Parameter]:
    """The parameters of a layer, frozen, each linear layer's followed by those of its adapters; without adapters as
    they are."""
    if model.lora.lora_rank is None:
        yield from parameters
        return
    for linear, own in groupby(parameters, lambda parameter: parameter.name.rpartition(".")[0]):
        yield from (replace(parameter, frozen=parameter.family != "adapter") for parameter in own)
        for adapter in adapters_of(model, linear):
            yield from (adapter.a, adapter.b)
