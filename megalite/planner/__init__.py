"""The planner: time and memory of a layout before it is launched, and the best layout for a cluster (no torch).

    config ──> memory.py  bytes per rank and term        (states.py to the byte, activations.py to 5 %)
           ──> cost.py    seconds per stage and action ──> schedule.simulate ──> predict.py: a step
    hardware/*.yaml, a measured profile ──┘
           ──> search.py  every legal layout, pruned by closed forms, the best simulated ──> report.py
           ──> uneven.py  recomputation and cuts stage by stage, where memory binds

Studies made of it stand in tools/: plan_fit.py (why nothing fits, and the smallest change that would), what_if.py and
plan_plot.py (sweeps of searches, as a table and as a picture), compare_published.py (runs that others measured, beside
what is predicted of them).

The rules are the product's own: a layout is legal if `config.legal.problems` finds nothing, a stage holds what
`schedule.partition` gives it, the pipeline takes the time that the simulator finds for the program that will run.

Invariant: one truth. The start-up table of a run, `--dry-run` and `tools/plan.py` use the same formulas. Proof:
tests/unit/planner (states against real buffers, activations against autograd, the search against brute force), and
`tools/check_plan.py`, which measures what was predicted.
"""
