"""The schedules, one file each, and the table of them (`registry.py`).

Adding one: a file beside these that exports `SCHEDULE` (its name, what shapes are legal, its generator) with a drawing
at its head, and a line in the table. The validator, the simulator, the drawings, the executor and the planner know it
from there on; `tests/unit/schedule` draws random shapes of every entry.

    flush           gpipe, one_f_one_b, eager_1f1b, interleaved, breadth_first, chimera
    zero bubble     zb_h1, zb_h2, zb_v, dualpipe_v
    no flush        pipedream, pipedream_2bw (on no_flush.py)
"""
