"""Races between streams, found without a GPU.

    with watched_gpu() as gpu:                       # from here on this process has a GPU, made of bookkeeping
        ... anything of the product, on torch.device("cuda") ...
    assert gpu.races == []                           # pairs of source lines that nothing orders

    order.py      lines, clocks, memory: who must have waited for whom
    streams.py    stand-ins for streams and events
    device.py     what says "cuda": tensors, storages, torch.cuda, threads of the host
    watch.py      every kernel: where it runs, what it reads and writes, whether the host waits
    messages.py   collectives and messages as NCCL orders them, carried by gloo

Kernels compute at once, on CPU memory, so numbers are right even where an order is missing: a race is found from what
was waited for, not from what happened to happen.

Invariant and proof: each planted race is found by both of its lines (`tests/unit/testing/test_planted_races.py`), no
sound order is blamed (`test_sound_orders.py`).
"""

from megalite.testing.races.device import watched_gpu
from megalite.testing.races.streams import DEVICE, Gpu
