"""The rules that tie fields together, one function a topic; each yields its problems, one line each.

A rule may assume that every field alone is within its bounds; it may not assume that other rules hold. It is pure.
Conditions on one field, or on two of one section, are facts of its option: bounds, `needs` (a flag without which it is
refused), `only_with` (without which it has no effect), `rival` (beside which it is refused). What is ignored beside
other values: a condition of `idle.py`. Only conditions on values, or across sections, are functions here: write one in
the file of its topic, put it in `RULES`, add its row to `test_bad_input.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalite.config.root import Config
from megalite.config.rules import beside, context, experts, foreign, inputs, layout, lora, meshes, run, shape

Rule = Callable[[Config, int], Iterator[str]]

LAYOUT_RULES: tuple[Rule, ...] = (
    layout.world,
    meshes.stage_meshes,
    layout.tensor_parallel,
    context.context_parallel,
    experts.expert_parallel,
    layout.pipeline_stages,
    lora.prefix_layout,
)
"""Those of the layout of a model that is not trained."""

RULES: tuple[Rule, ...] = (
    shape.model_shape,
    shape.recompute,
    lora.lora,
    lora.prefix_layout,
    layout.world,
    meshes.stage_meshes,
    meshes.training_stage_meshes,
    layout.tensor_parallel,
    layout.overlap,
    context.context_parallel,
    context.sequence_lengths,
    experts.experts,
    experts.expert_parallel,
    layout.pipeline_stages,
    layout.stage_layers,
    layout.pipeline_schedule,
    beside.message_driven,
    layout.batch,
    run.length,
    run.restarts,
    run.precision,
    run.spikes,
    run.qk_clip,
    run.mup,
    run.float8,
    run.learning_rate,
    run.weight_decay,
    run.update_rule,
    beside.tapped_products,
    beside.embedding_offload,
    beside.param_offload,
    beside.zero_plus_plus,
    beside.partial_backprop,
    meshes.tensor_grid,
    beside.cuda_graphs,
    inputs.data,
    inputs.checkpoint,
    inputs.local_saves,
    inputs.tracking,
)
