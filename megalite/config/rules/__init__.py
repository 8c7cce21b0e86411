"""The rules that tie fields together, one function a topic; each yields its problems, one line each.

A rule may assume that every field alone is within its bounds; it may not assume that other rules hold. It is pure.
Conditions on one field, or on two of one section, are facts of its option: bounds, `needs` (a flag without which it is
refused), `only_with` (without which it has no effect). What is ignored beside other values: a row of `idle.py`. Only
conditions on values, or across sections, are functions here: write one in the file of its topic, put it in `RULES`, add
its row to `test_bad_input.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalite.config.root import Config
from megalite.config.rules.beside import cuda_graphs, message_driven, partial_backprop, tapped_products, zero_plus_plus
from megalite.config.rules.context import context_parallel, sequence_lengths
from megalite.config.rules.experts import expert_parallel, experts
from megalite.config.rules.foreign import foreign_module
from megalite.config.rules.inputs import checkpoint, data, from_checkpoint, local_saves, tracking
from megalite.config.rules.layout import (
    batch,
    overlap,
    pipeline_schedule,
    pipeline_stages,
    stage_layers,
    tensor_parallel,
    warnings,
    world,
)
from megalite.config.rules.lora import lora, prefix_layout
from megalite.config.rules.meshes import stage_meshes, tensor_grid, training_stage_meshes
from megalite.config.rules.offload import embedding_offload, param_offload
from megalite.config.rules.run import (
    float8,
    learning_rate,
    length,
    mup,
    precision,
    qk_clip,
    restarts,
    spikes,
    update_rule,
    weight_decay,
)
from megalite.config.rules.shape import model_shape, recompute

__all__ = ["LAYOUT_RULES", "RULES", "foreign_module", "warnings"]

LAYOUT_RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    world,
    stage_meshes,
    tensor_parallel,
    context_parallel,
    expert_parallel,
    pipeline_stages,
    prefix_layout,
)
"""Those of the layout of a model that is not trained."""

RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    model_shape,
    recompute,
    lora,
    prefix_layout,
    world,
    stage_meshes,
    training_stage_meshes,
    tensor_parallel,
    overlap,
    context_parallel,
    sequence_lengths,
    experts,
    expert_parallel,
    pipeline_stages,
    stage_layers,
    pipeline_schedule,
    message_driven,
    batch,
    length,
    restarts,
    precision,
    spikes,
    qk_clip,
    mup,
    float8,
    learning_rate,
    weight_decay,
    update_rule,
    tapped_products,
    embedding_offload,
    param_offload,
    zero_plus_plus,
    partial_backprop,
    tensor_grid,
    cuda_graphs,
    data,
    checkpoint,
    from_checkpoint,
    local_saves,
    tracking,
)
