"""Watching a run without touching it.

    stats           measurements of a step, and the record of a log interval: the columns of metrics.jsonl
    hooks           the events of a run, for hooks that the trainer does not know
    observers       pace, metrics.jsonl, samples, the profiler; which rank has which hooks
    slow_ranks      the search for a rank that is slower than its stage, and for uneven stages
    loggers         the console, TensorBoard and Weights & Biases
    alerts          Prometheus, and `--on-event`
    curves          curves as SVG: the picture of the loss, the report
    live_memory     the measured peak next to the predicted one

Invariant: hooks never change a run (`tests/unit/observe/test_observed_run.py`).
"""

from megalite.observe.curves import COLORS, HEIGHT, MARGIN, WIDTH, render_chart, series
from megalite.observe.hooks import Hook, Hooks, TrainerView
from megalite.observe.live_memory import LiveBytes
from megalite.observe.observers import METRICS_FILE, RUN_FILES, make_hooks, read_metrics
from megalite.observe.stats import ExpertStats, Record, StepStats, evaluation_record, perplexity
