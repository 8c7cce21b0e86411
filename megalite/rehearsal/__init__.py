"""A cluster on a laptop: the real code of every distinct rank of a run, on a device that is bookkeeping.

    with watched_gpu() as gpu:                       # from here on this process has a GPU, made of bookkeeping
        ... anything of the product, on torch.device("cuda") ...
    assert gpu.races == []                           # pairs of source lines that nothing orders

    rehearse_run(rehearsed(flags, 1024)).faults      # the same for a whole run, without values: see tools/rehearse.py
    rehearse(train, nprocs=64).faults                # and for a function of the library's users: `megalite.rehearse`

    order, streams, device, watch, messages     a GPU of bookkeeping, who must have waited for whom, NCCL's rules
    values, stand_ins, fake_groups              a device without values, its kernels, its communicators
    graphs                                      CUDA graphs, and what they forbid
    rank, record, short, classes, pieces        one rank of a run, what it starts, which ranks are rehearsed
    match, allocator, memory, timing            checks over all ranks: both ends, circles, memory, time
    late, witness                               the same on real values, with streams that work as late as they may
    report                                      the whole of it, of a run or of a function of the library's users

A run that is not rehearsed imports nothing of this room, and no file of the product asks whether it is rehearsed.

Invariant and proof: each planted race is found by both of its lines (`tests/unit/rehearsal/test_planted_races.py`), no
sound order is blamed (`test_sound_orders.py`); each fault between ranks is found and named, and sound layouts have none
(`tests/equivalence/test_rehearsal.py`).
"""

from megalite.rehearsal.device import watched_gpu
from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.match import Fault
from megalite.rehearsal.rank import alone, rehearse_rank, rehearsed, unseen
from megalite.rehearsal.report import as_json, explain, rehearse, rehearse_run
from megalite.rehearsal.streams import DEVICE, Gpu
from megalite.rehearsal.timing import write_trace
from megalite.rehearsal.witness import with_values
