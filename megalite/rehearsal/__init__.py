"""A cluster on a laptop: the real code of every distinct rank of a run, on a device that is bookkeeping.

    with watched_gpu() as gpu:                       # from here on this process has a GPU, made of bookkeeping
        ... anything of the product, on torch.device("cuda") ...
    assert gpu.races == []                           # pairs of source lines that nothing orders

    rehearse_run(rehearsed(flags, 1024)).faults      # the same for a whole run, without values: see tools/rehearse.py
    rehearse(train, nprocs=64).faults                # and for a function of the library's users: `megalite.rehearse`

    order.py        lines, clocks, memory: who must have waited for whom
    streams.py      stand-ins for streams and events
    device.py       what says "cuda": tensors, storages, torch.cuda, threads of the host
    watch.py        every kernel: where it runs, what it reads and writes, whether the host waits
    values.py       what kernels return where there are no values, and what the host finds where it reads
    messages.py     collectives and messages as NCCL orders them, carried by gloo or by nobody
    stand_ins.py    kernels that a GPU would choose
    fake_groups.py  process groups of a rank that is alone
    record.py       what a rank starts, and what each call is behind
    rank.py         one rank of a run, from its start to its end
    classes.py      which ranks are rehearsed
    match.py        checks over all ranks: both ends are the same, and no circle of ranks waits for itself
    short.py        a few micro-batches in the place of hundreds
    allocator.py    torch's caching allocator, in numbers
    memory.py       the memory of the whole batch, composed; leaks, and what differs from the plan
    pieces.py       what each rank would write of a checkpoint
    late.py         streams that work as late as they may, on real values
    witness.py      a small layout of the run with such streams
    timing.py       when all of that would run
    report.py       the whole of it, and where the host waits
    function.py     `rehearse`: a function of the library's users

A run that is not rehearsed imports nothing of this room, and no file of the product asks whether it is rehearsed.

Invariant and proof: each planted race is found by both of its lines (`tests/unit/rehearsal/test_planted_races.py`), no
sound order is blamed (`test_sound_orders.py`); each fault between ranks is found and named, and sound layouts have none
(`tests/equivalence/test_rehearsal.py`).
"""

from megalite.rehearsal.device import watched_gpu
from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.function import rehearse
from megalite.rehearsal.match import Fault
from megalite.rehearsal.rank import alone, rehearse_rank, rehearsed
from megalite.rehearsal.report import as_json, explain, rehearse_run
from megalite.rehearsal.streams import DEVICE, Gpu
from megalite.rehearsal.timing import write_trace
from megalite.rehearsal.witness import with_values
