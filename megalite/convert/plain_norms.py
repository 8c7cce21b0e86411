"""Models whose norms multiply by 1 + weight, as families have them that multiply by the weight: 1 is added to it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.convert.family import HuggingFaceFamily
from megalite.convert.registry import family_of
from megalite.convert.source import ModelSource
from megalite.errors import ConfigError
from megalite.inventory import stage_parameters


class PlainNorms:
    """A `ModelSource`. Sums are made in fp32, or wider, and have the dtype of what is stored."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.model: ModelConfig = replace(source.model, apply_layernorm_1p=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @cached_property
    def _norms(self) -> frozenset[str]:
        """Names of the weights that begin at 0 there and at 1 here."""
        layers = range(self.model.num_layers + 2)
        both = (stage_parameters(model, layers) for model in (self._source.model, self.model))
        return frozenset(name for (name, a), (_, b) in zip(*both, strict=True) if a.init_value != b.init_value)

    def read(self, name: str) -> Tensor:
        values = self._source.read(name)
        if name not in self._norms:
            return values
        return (values.to(torch.promote_types(values.dtype, torch.float32)) + 1).to(values.dtype)


def source_and_family(source: ModelSource) -> tuple[ModelSource, HuggingFaceFamily]:
    """The source as a family of Hugging Face's has its model, and the family. Raises ConfigError where none has."""
    kind = source.origin.model_type
    try:
        return source, family_of(source.model, kind)
    except ConfigError:
        if not source.model.apply_layernorm_1p:
            raise
        plain = PlainNorms(source)
        return plain, family_of(plain.model, kind)
