"""All families, and which of them a model is."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    build_section,
    effective,
    model_shape,
)
from megalite.convert.deepseek import DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, KIMI_K2
from megalite.convert.family import HuggingFaceFamily
from megalite.convert.fields import MOST_LAYERS, Fields
from megalite.convert.gpt import GPT2, GPT_NEOX
from megalite.convert.llama import GPT_OSS, LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN3, QWEN3_MOE
from megalite.convert.norms_behind import GEMMA2, GEMMA3, OLMO2, OLMO3
from megalite.convert.quantized import quantized_tensors
from megalite.convert.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megalite.convert.source import ModelSource
from megalite.errors import ConfigError
from megalite.inventory import stage_parameters

FAMILIES: Mapping[str, HuggingFaceFamily] = {
    f.name: f
    for f in (
        GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMOE, OLMO2, OLMO3, GEMMA2, GEMMA3, GPT_OSS,
        QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, DEEPSEEK_V3, KIMI_K2, GLM4_MOE, GLM4_MOE_LITE,
    )
}  # fmt: skip

WITH_IMAGES: Mapping[str, str] = {"qwen3_5": QWEN3_5.name, "qwen3_5_moe": QWEN3_5_MOE.name}
"""Models of which the text's part is read -> the family that this is."""

# Long contexts stay representable (--max-position-embeddings), but no run begins with sequences of 128k by accident.
USUAL_SEQ_LENGTH = 4096


def read_model(raw: Mapping[str, Any], where: str) -> tuple[HuggingFaceFamily, ModelConfig]:
    """config.json -> its family and the model. Raises ConfigError for what we do not have."""
    fields = Fields(raw, where)
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in WITH_IMAGES:
        tied = {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}
        kind, fields = WITH_IMAGES[kind], Fields({**fields.section("text_config").raw, **tied}, f"{where}: text_config")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{where}: model_type {str(kind)[:40]!r} not supported ({', '.join(FAMILIES)})")
    if settings := fields.section("quantization_config").raw:
        quantized_tensors(settings, (), where)
    model = FAMILIES[kind].read(fields)
    model = dataclasses.replace(model, seq_length=min(model.max_positions, USUAL_SEQ_LENGTH))
    check_shape(model, where)
    return FAMILIES[kind], model


def check_shape(model: ModelConfig, where: str) -> None:
    """Raises ConfigError where numbers that were read are no model."""
    problems = list(model_shape(config_around(model), 1))
    if model.num_layers > MOST_LAYERS:
        problems.append(f"{model.num_layers} layers: more than {MOST_LAYERS}")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])


def config_around(model: ModelConfig, optimizer: OptimizerConfig | None = None, **training: Any) -> Config:
    """A configuration that describes weights which no run of ours has trained."""
    return Config(
        model=model,
        training=build_section(TrainingConfig, {"micro_batch_size": 1, "train_iters": 1, **training}),
        optimizer=optimizer or OptimizerConfig(lr=1e-5),
        data=DataConfig(),
    )


def config_of_weights(model: ModelConfig, stored: torch.dtype) -> Config:
    """The same, with the precision in which the weights are stored."""
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(stored)
    return config_around(model, None, **({precision: True} if precision else {}))


def family_of(model: ModelConfig, preferred: str | None = None) -> HuggingFaceFamily:
    """The first family whose config.json means exactly this model; `preferred` is tried before the others.

    Raises ConfigError naming what keeps the nearest family from it.
    """
    preferred, others = WITH_IMAGES.get(preferred or "", preferred), []
    for family in sorted(FAMILIES.values(), key=lambda family: family.name != preferred):
        try:
            lost = list(lost_settings(model, family.read(Fields(family.write(model), "config.json"))))
        except ConfigError as error:  # it has no such model; what else it does not say is no setting that is lost
            others.append((len(effective(model)), family.name, [str(error)]))
            continue
        if not lost:
            return family
        others.append((len(lost), family.name, lost))
    _, nearest, lost = min(others, key=lambda other: other[0])
    raise ConfigError(f"no Hugging Face family has this model; nearest is {nearest}: {', '.join(lost)}")


def lost_settings(model: ModelConfig, back: ModelConfig) -> Iterator[str]:
    """Settings in which a model differs from what its description elsewhere says."""
    there = effective(back)
    for name, value in effective(model).items():
        if there[name] != value:
            yield f"`{name}`={value} (there {there[name]})"


class PlainNorms:
    """A model whose norms multiply by 1 + weight, as families have it that multiply by the weight: 1 is added to it.

    A `ModelSource`. Sums are made in fp32, or wider, and have the dtype of what is stored.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.model: ModelConfig = dataclasses.replace(source.model, apply_layernorm_1p=False)

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
