"""README.md of an export: what trained it, in the form of the Hub's model cards. It names no path of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import megalite
from megalite.checkpoint import Manifest, Meta
from megalite.config import Config, ModelConfig
from megalite.convert.origin import Origin
from megalite.inventory import parameter_shapes

CARD = "README.md"
UNKNOWN = (
    "The data, the licence and the intended use are not recorded: whoever publishes the model adds them, and the "
    "licence of a base model holds on."
)


@dataclass(frozen=True)
class TrainingFacts:
    """What a run of ours has done to a model. config: of that run, as its newest checkpoint has it."""

    config: Config
    iteration: int
    samples: int

    @classmethod
    def of(cls, manifest: Manifest, config: Config, where: str) -> TrainingFacts | None:
        """None for a checkpoint that was converted and not trained. Raises CheckpointError."""
        if "progress" not in manifest.meta:
            return None
        meta = Meta(manifest.meta, where)
        return cls(config, meta.integer("iteration", 0), meta.integer("consumed_samples", 0))


def model_card(
    model: ModelConfig, family: str, origin: Origin, facts: TrainingFacts | None, base: str | None, *, adapters: bool
) -> str:
    """Text of a model card. base: hub id of the model that the training began with. adapters: LoRA's alone."""
    # What stands in the header is checked (hub ids) or ours, so nothing of it can be YAML of a stranger's.
    header = {"base_model": base, "library_name": "peft" if adapters else "transformers"}
    lines = ["---", *(f"{key}: {value}" for key, value in header.items() if value)]
    lines += ["pipeline_tag: text-generation", "tags:", "- megalite", *(["- lora"] if adapters else []), "---", ""]
    count = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    lines += [f"# {'LoRA adapters of a' if adapters else 'A'} {family} model of {count:,} parameters", ""]
    did = "Converted" if facts is None else "Trained"
    lines += [f"{did} with megalite {megalite.__version__}.", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in _rows(model, origin, facts, base)]
    return "\n".join([*lines, "", UNKNOWN, ""])


def _rows(
    model: ModelConfig, origin: Origin, facts: TrainingFacts | None, base: str | None
) -> Iterator[tuple[str, str]]:
    if base is not None:
        yield "base model", f"[{base}](https://huggingface.co/{base})"
    elif origin.model_type is not None:
        yield "base model", f"a {origin.model_type} model, whose name on the Hub is not recorded"
    layers = f"{model.num_layers} layers of width {model.hidden_size:,}, {model.num_attention_heads} heads"
    yield "architecture", f"{layers}, vocabulary of {model.vocab_size:,}"
    if facts is None:
        return
    if base is None and origin.model_type is None:
        yield "began with", f"random weights (seed {facts.config.training.seed})"
    lora = facts.config.model.lora
    yield "trained", "all weights" if lora.lora_rank is None else lora.words(lora.lora_targets)
    length, samples = facts.config.model.seq_length, facts.samples
    yield "iterations", f"{facts.iteration:,}"
    yield "samples", f"{samples:,} of at most {length:,} tokens"
    optimizer = facts.config.optimizer
    rate = f"learning rate {optimizer.lr:g} ({optimizer.lr_decay_style}, at the end {optimizer.min_lr:g})"
    yield "optimizer", f"{optimizer.optimizer}, {rate}, weight decay {optimizer.weight_decay:g}"
    yield "precision", facts.config.training.precision.name
