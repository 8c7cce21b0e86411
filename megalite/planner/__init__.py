"""The planner: time and memory of a layout before it is launched, and the best layout for a cluster (no torch).

    config ──> memory.py  bytes per rank and term        (model_states.py to the byte, activations.py to 5 %)
           ──> cost.py    seconds per stage and action ──> schedule.simulate ──> predict.py: a step
    hardware/*.yaml, a measured profile ──┘
           ──> search.py  every legal layout, pruned by closed forms, the best simulated ──> result_table.py
           ──> estimate.py  those closed forms
           ──> closed_form.py  model, data and domain parallelism as sums of messages (Gholami et al.)
           ──> budget.py  what lies on the host under a budget of device memory
           ──> host_states.py  seconds of optimizer states off the device, room over devices and hosts
           ──> inter_operator.py, unlike_stages.py  stages that may differ; intra_operator.py  inside a block (Alpa)
           ──> uneven.py  recomputation and cuts stage by stage, where memory binds

Studies based on it are in tools/: plan_fit.py (why nothing fits, and the smallest change that would), what_if.py and
plan_plot.py (sweeps of searches, as a table and as a picture), compare_published.py (runs that others measured, beside
what is predicted of them).

The rules are the product's own: a layout is legal if `config.config_problems` finds nothing, a stage holds what
`schedule.partition` gives it, the pipeline takes the time that the simulator finds for the program that will run.

Invariant: one truth. The search and `tools/plan.py` use the same formulas; the start of a run and `--dry-run` read what
a rank holds from buffers and optimizers built on `meta`, and what blocks keep of a micro-batch from blocks that run
without values, where they can (`PlannedStages.held`, `kept`; `megalite.train.kept_activations`). Proof:
tests/unit/train/test_built_states.py (to the byte, over optimizers, ZeRO, versions and tiers), tests/unit/planner
(states against real buffers, activations against autograd, the search against brute force), and `tools/check_plan.py`,
which measures what was predicted.
"""

from megalite.planner.activations import StageActivations
from megalite.planner.budget import within_budget
from megalite.planner.closed_form import closed_form, explain_terms
from megalite.planner.communication import CommGroup
from megalite.planner.cost import Roofline
from megalite.planner.estimate import FastEstimator
from megalite.planner.float8 import float8_problems
from megalite.planner.hardware import Hardware, Link, available, hardware_of, load_cluster, load_hardware, peak_flops
from megalite.planner.host_states import chunk_capacity
from megalite.planner.inter_operator import StageCost, plan_stages
from megalite.planner.intra_operator import block_text
from megalite.planner.memory import (
    TERMS,
    PlannedStages,
    RankMemory,
    as_built,
    foreign_memory,
    pipeline_memory,
    rank_memory,
    shared_memory_bytes,
)
from megalite.planner.model_states import StateBytes, checkpoint_bytes, fullest_owner, named_state_bytes
from megalite.planner.predict import Prediction, predict, program_of, steady_state
from megalite.planner.profile import Profile, load_profile, mean_profile, measured_model
from megalite.planner.result_table import as_json, budget, energy_text, gb, layout_text, states_text, summary, time_text
from megalite.planner.search import OverBudget, SearchResult, pareto, search
from megalite.planner.search_space import (
    SEARCHED,
    Layout,
    apply,
    layout_of,
    layouts,
    legal_layouts,
    reasons_against,
    shapes,
)
from megalite.planner.software import (
    DEEPSPEED_2021,
    LLAMA_2024,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2024,
    TORCH_2023,
    Software,
)
from megalite.planner.startup_table import NO_ROOM, TOO_SMALL, describe_layout, foreign_rows, format_table, startup_rows
from megalite.planner.unlike_stages import DeviceClass, best_unlike
