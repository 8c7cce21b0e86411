"""The rules that tie fields together, one function a topic; each yields its problems, one line each.

A rule may assume that every field alone is within its bounds; it may not assume that other rules hold. It is pure.
Conditions on one field, or on two of one section, are facts of its option: bounds, `needs` (a flag without which it is
refused), `only_with` (without which it has no effect), `rival` (beside which it is refused). Two settings that exclude
each other across sections are a row of `beside.PAIRS`; what is ignored beside other values is a condition of `idle.py`.
All else is a function here: write it in the file of its topic, put it in `RULES`, add its row to `test_bad_input.py`.
"""

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

RULES: tuple[tuple[Rule, str | None], ...] = (
    (shape.model_shape, None),
    (shape.recompute, None),
    (lora.lora, "lora_rank"),
    (lora.prefix_layout, None),
    (layout.world, None),
    (meshes.stage_meshes, None),
    (meshes.training_stage_meshes, None),
    (layout.tensor_parallel, None),
    (layout.overlap, "tp_comm_overlap"),
    (context.context_parallel, None),
    (context.sequence_lengths, "seq_length_schedule"),
    (experts.experts, "num_experts"),
    (experts.expert_parallel, None),
    (layout.pipeline_stages, None),
    (layout.stage_layers, None),
    (layout.pipeline_schedule, None),
    (beside.message_driven, None),
    (layout.batch, None),
    (run.length, None),
    (run.restarts, None),
    (run.precision, None),
    (run.spikes, "on_spike"),
    (run.qk_clip, "qk_clip"),
    (run.mup, "use_mup"),
    (run.float8, "fp8_format"),
    (run.learning_rate, None),
    (run.weight_decay, None),
    (run.update_rule, None),
    (run.delayed_update, "delayed_parameter_update"),
    (beside.pairs, None),
    (beside.tapped_products, "optimizer"),
    (beside.embedding_offload, "embedding_offload"),
    (beside.param_offload, "param_offload"),
    (beside.zero_plus_plus, None),
    (beside.partial_backprop, "partial_backprop_groups"),
    (meshes.tensor_grid, None),
    (beside.cuda_graphs, "cuda_graph_impl"),
    (inputs.data, None),
    (inputs.checkpoint, None),
    (inputs.local_saves, None),
    (inputs.tracking, None),
)
"""All rules, and the setting without which one has nothing to say (`beside.is_on`); None: it always may."""
