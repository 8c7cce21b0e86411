"""Watching a run without touching it.

    stats           what one step measured, and what a log interval makes of it: the columns of metrics.jsonl
    hooks           how a run is watched without the trainer knowing who watches
    observers       who writes metrics.jsonl, the profiler, the search for a slow rank; which rank has which observers
    console, tracking       one line per log interval; TensorBoard and Weights & Biases
    live_memory     the measured peak next to the predicted one
    pipeline_trace  what the pipeline really did, in the forms that plans are drawn in

Invariant: hooks never change a run (`tests/unit/observe/test_observed_run.py`).
"""

from megalite.observe.hooks import Hook, Hooks, TrainerView
from megalite.observe.live_memory import LiveBytes
from megalite.observe.observers import METRICS_FILE, SAMPLES_FILE, make_hooks, read_metrics
from megalite.observe.pipeline_trace import PipelineTracer
from megalite.observe.stats import ExpertStats, Record, StepStats, evaluation_record, perplexity
