"""Training: the composition root and the loop, and everything that watches them (floor 7).

    build.py        the one place that knows all rooms: configuration -> model, data, optimizer, program, Trainer
    trainer.py      the loop: one global batch, one step, one StepStats
    stats.py        StepStats, and the record that a log interval makes of them
    peaks.py        peak rates of devices, for MFU
    hooks.py        Hook, and what a hook may see of the trainer
    observers.py    metrics.jsonl, profiler, slow ranks; which rank writes what
    console.py      Megatron's console line
    tracking.py     TensorBoard and Weights & Biases
    startup.py      the table that a run prints before its first step
    exits.py        when to stop: interval, duration, signal, agreed by all ranks
    loading.py      a checkpoint as a model in one process
    generate.py     sampling with a key-value cache
    evaluation.py   loss, perplexity, bits per byte and task scores of a loaded model

Invariant: hooks never change a run. With or without them, every loss and every weight has the same bits
(`tests/unit/training`).
"""
