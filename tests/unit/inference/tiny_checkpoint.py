"""A checkpoint as the trainer writes it, of a model that was never trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import Checkpointer
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard
from megalite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megalite.config.saved import to_dict
from megalite.config.training import Precision, TrainingLength
from megalite.data.tokenizer import ByteTokenizer, Tokenizer
from megalite.data.tokenizer_io import tokenizer_files
from megalite.inventory import placement_of
from megalite.models import build_stack, layer_specs
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext

TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. \u00e4\u00f6\u00fc \u2014 and so it goes.\n" * 3


def tiny_model_config(**changes: Any) -> ModelConfig:
    """h 16, L 2, a 2, s 16, bytes; wide initial weights, so that the logits differ."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=16,
        vocab_size=257,
        init_method_std=0.4,
    )
    return dataclasses.replace(config, **changes)


def write_checkpoint(
    directory: Path, *, model: ModelConfig | None = None, tokenizer: Tokenizer | None = None, step: int = 7
) -> tuple[Config, LayerStack]:
    """Save an initialised model in fp64 under `directory`; returns its configuration and the model itself."""
    tokenizer = tokenizer or ByteTokenizer()
    config = Config(
        model=model or tiny_model_config(vocab_size=tokenizer.vocab_size),
        training=TrainingConfig(
            micro_batch_size=2, length=TrainingLength(train_iters=10), precision=Precision(fp64=True)
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(split="50,50,0"),
    )
    stack = build_stack(config.model, layer_specs(config.model), LayerContext(dtype=torch.float64), init_seed=3)
    shards = []
    for name, parameter in stack.logical_parameters():
        place = placement_of(parameter)
        inside = tuple(slice(extent) for extent in place.valid_shape(tuple(parameter.shape)))
        shards.append(TensorShard(name, place.global_shape, place.offset, parameter.detach()[inside]))
    meta = {"config": to_dict(config), "iteration": step, "consumed_samples": 2 * step}
    Checkpointer(directory, world=Axis.single("world")).save(step, shards, meta, tokenizer_files(tokenizer))
    return config, stack.eval()


def all_logits(stack: LayerStack, ids: list[int]) -> torch.Tensor:
    """`[len(ids), V]` of one sequence in one forward: no cache, no window, no batch."""
    from megalite.microbatch import Microbatch

    row = torch.tensor([ids])
    batch = Microbatch(
        tokens=row,
        labels=row,
        positions=torch.arange(len(ids))[None],
        loss_mask=torch.ones(row.shape),
        sample_ids=torch.zeros(1, dtype=torch.int64),
    )
    with torch.no_grad():
        return stack.get_submodule("head").logits(stack.body(None, batch))[:, 0]  # type: ignore[operator]
