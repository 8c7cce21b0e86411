"""Training: the composition root, the loop, everything that watches them, and what a finished model is used for
(floor 8).

::

    Config -- run.py --> build.py: model, data, optimizer, program --> Trainer.train()
                                                                          |  StepStats, records
                                                                          v
                                        Hooks -> console, metrics.jsonl, trackers, profiler, slow ranks

    run, build      the one place that knows all rooms; `open_run` gives a run that is ready to train
    trainer         the loop: decide, step, tell
    feed, update    micro-batches by number and their weights; what REDUCE, NORM and STEP mean
    dataflow, validation    the run's data; evaluation through the same pipeline
    state, directory        what a checkpoint of a run holds; the run directory
    stats, hooks    StepStats, the record that a log interval makes of them, who is told
    observers, console, tracking            who watches; which rank writes what
    startup, dry_run, matmul, pipeline_trace    the start-up table, `--dry-run`, product precision, measured timelines
    exits           when to stop: interval, duration, signal, agreed by all ranks
    loading, generate, evaluation, tasks    a checkpoint, and what the tools make of it

Invariants: hooks never change a run (`tests/unit/training/test_observed_run.py`); no layout changes what is computed
(`tests/equivalence`); a run that is stopped anywhere goes on with the same bits (`tests/faults`).
"""
