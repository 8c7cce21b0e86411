"""What a model consists of, without a tensor. The trainer builds from these values and the planner counts them.

Proof: tests/unit/inventory compares `nn` with it over every family and flag, and makes blocks differ.
"""

from megalite.inventory.activation_bytes import (
    MEAN_IMBALANCE,
    WORST_IMBALANCE,
    boundary_bytes,
    boundary_shape,
    compiled_bytes,
    context_bytes,
    expert_rows,
    keeps_entrance,
    kept_bytes,
    weight_only_bytes,
)
from megalite.inventory.adapters import Adapter, adapters_of, bottlenecks, held_in_8_bits, prefixes
from megalite.inventory.boxes import Box, cover, find_overlap
from megalite.inventory.buckets import (
    ALIGNMENT,
    BucketPlan,
    BucketSegment,
    BufferParameter,
    ParameterRange,
    align,
    bucket_limit,
    layer_of,
    plan_buckets,
)
from megalite.inventory.element_bytes import ElementBytes, micro_tokens
from megalite.inventory.families import AXIS_FAMILIES, DEALT
from megalite.inventory.grid_traffic import grid_exchanges, moved_by_a_block
from megalite.inventory.layers import (
    FLOPS_CONVENTION,
    WORD_EMBEDDINGS,
    Layer,
    add_up,
    block_models,
    blocks_of,
    count_active_parameters,
    count_parameters,
    count_trained_parameters,
    first_alike,
    flops_per_iteration,
    layer_name,
    model_layers,
    parameter_shapes,
    stage_parameters,
    vocabulary,
)
from megalite.inventory.memory_plan import DEFAULT_PLAN, MemoryPlan, Recompute, given_plan, given_recompute
from megalite.inventory.mixer_bytes import NARROW
from megalite.inventory.mixers import delta_vectors, learned_sinks
from megalite.inventory.parameter import Parameter
from megalite.inventory.parameter_placement import ParameterPlacement, Shape, placement_of
from megalite.inventory.pieces import Product, column, experts, mlp, norm, norm_start, router, row, whole
from megalite.inventory.pipeline import computations, lowered_program, stage_layer_ranges
from megalite.inventory.tiling import (
    BLOCKED_FROM,
    BLOCKED_UP_TO,
    GRAPH_WARM_UP,
    STEP_PIECE,
    block_area,
    chunk_length,
    query_blocks,
    recompute_ranges,
    recomputed_layers,
)
from megalite.inventory.transfer_plan import DIRECT, GATHERED, RELAYED, TransferPlan, fastest_way, transfer_plan
