"""The schedules, one file each, and the table of them (`registry.py`).

To add one, write a file beside these that exports `SCHEDULE` (its name, the legal shapes, its generator) and begins
with a drawing, and add a line to the table. Validator, simulator, drawings, executor and planner then know it, and
`tests/unit/schedule` tests random shapes of it.

    flush           gpipe, one_f_one_b, eager_1f1b, interleaved, breadth_first, chimera,
                    chimera_doubling, message_driven
    recomputation   shifted_critical_path
    zero bubble     zb_h1, zb_h2, zb_v, dualpipe_v
    no flush        pipedream, pipedream_2bw (on no_flush.py)
"""
