"""Pipeline schedules as data (pure Python, no torch).

    generator -> Program -> passes -> Program -> validate, simulate, render, execute
    (schedules/)            (SEND, RECV, REDUCE)                      drawing/

    p=2, m=3     rank 0  F0 F1 .. B0-B0 F2 B1-B1 .. B2-B2
    1f1b         rank 1  .. F0 B0-B0 F1 B1-B1 F2 B2-B2 ..

Use::

    from megalite.schedule import build_program, lower, validate

    program = lower(build_program("2bw", num_ranks=4, num_microbatches=8))      # ScheduleError if the shape is illegal
    validate(program)                                           # ScheduleError with a drawing if it is wrong
    for t in range(num_batches):
        batch = program.batch(t, first=t == 0, last=t == num_batches - 1)
        for action in program.actions_for_batch(rank, batch):   # F B I W SEND_* RECV_* REDUCE NORM STEP
            ...

Invariant: what is validated, simulated and drawn is what runs; there is no second description of any schedule. Proof:
tests/unit/schedule (closed forms of the papers, random shapes, mutations).
"""

from megalite.schedule.action import (
    AWAITING_WEIGHT,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    GRADIENT_KINDS,
    NONE,
    NORM,
    PREFETCH,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    STEP,
    UNSHARD,
    Action,
    StageKey,
    parse_action,
)
from megalite.schedule.arrival import share_of
from megalite.schedule.chunks import ChunkKey, ChunkTraffic, ChunkUse, chunk_traffic, plan_chunks, with_chunks
from megalite.schedule.decode import forward_program, token_pairs
from megalite.schedule.definition import ScheduleShape
from megalite.schedule.drawing.chrome_trace import render_trace
from megalite.schedule.drawing.svg import render_html, render_svg
from megalite.schedule.drawing.text import render_text
from megalite.schedule.eviction import belady
from megalite.schedule.partition import (
    compact_layout,
    division_text,
    expand_layout,
    faster_division,
    partition,
    partition_of,
)
from megalite.schedule.passes import delay_update, insert_unshard, lower, merge_backward
from megalite.schedule.program import ActivationRoom, BatchRange, PeakActivations, Program, WeightChunks
from megalite.schedule.schedules.registry import (
    ALIASES,
    SCHEDULES,
    build_program,
    default_schedule,
    find_schedule,
    resolve_chunks,
    schedule_problems,
    schedule_warnings,
)
from megalite.schedule.simulate import Costs, Time, Timeline, simulate
from megalite.schedule.stage_placement import StagePlacement
from megalite.schedule.text_format import dump_program, load_program, parse_program
from megalite.schedule.transfers import Residency, insert_transfers, residency
from megalite.schedule.validate import validate
