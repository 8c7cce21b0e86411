"""The schedules, one file each, and the table of them (`registry.py`).

To add one: CONTRIBUTING, "Adding a schedule".

    flush           gpipe, one_f_one_b, eager_1f1b, interleaved, breadth_first, chimera,
                    chimera_doubling, message_driven
    recomputation   shifted_critical_path
    zero bubble     zb_h1, zb_h2, zb_v, dualpipe_v
    no flush        pipedream, pipedream_2bw (on no_flush.py)
"""
