"""Low-rank adapters beside linear layers (LoRA, arXiv 2106.09685): which there are, and what they consist of."""

from __future__ import annotations

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
    grouped by key/value head (`nn.attention.layer`); those of each are in the order of heads."""
    h, f, q, kv, d = model.hidden_size, model.ffn_size, model.query_size, model.kv_size, model.head_dim
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
    found = []
    for part, (rows, place) in places.get(linear, {}).items():
        if part in model.adapted_parts:
            row_parallel = linear in ("attention.proj", "mlp.fc2")
            columns = {"attention.proj": q, "mlp.fc2": f}.get(linear, h)
            rank, names = model.lora.lora_rank or 1, [f"{linear}.adapters.{part}.lora_{letter}" for letter in "ab"]
            std = 1 / math.sqrt(3 * columns)  # the deviation of peft's uniform numbers
            cut_a, cut_b = (1, None) if row_parallel else (None, len(rows) - 1)
            a = Parameter(names[0], (rank, columns), cut_a, init_std=std, family="adapter")
            b = Parameter(names[1], (*rows, rank), cut_b, family="adapter")
            a, b = (a, replace(b, partial="heads")) if row_parallel else (replace(a, partial="heads"), b)
            found.append(Adapter(part, a, b, *place))
    return found


def with_adapters(parameters: Iterable[Parameter], model: ModelConfig) -> Iterator[Parameter]:
    """The parameters of a layer, frozen, each linear layer's followed by those of its adapters; without adapters as
    they are."""
    if model.lora.lora_rank is None:
        yield from parameters
        return
    for linear, own in groupby(parameters, lambda parameter: parameter.name.rpartition(".")[0]):
        yield from (replace(parameter, frozen=True) for parameter in own)
        for adapter in adapters_of(model, linear):
            yield from (adapter.a, adapter.b)
