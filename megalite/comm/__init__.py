"""Communication: parallel axes as values, collectives over them, channels between pipeline stages.

    axis.py         Axis: a parallel axis is a value, size 1 is legal everywhere
    mesh.py         ParallelMesh: the grids of ranks, and products of axes
    world.py        rank, size, device and host of a process
    collectives.py  collectives over an Axis; an axis of size 1 costs nothing and needs no process group
    gathered_json.py    small values of every rank
    autograd.py     the conjugate pairs f and g of Megatron-LM (arXiv 1909.08053) and of sequence parallelism
                    (arXiv 2205.05198)
    exchange.py     reduce-scatter and all-gather by direct messages, for gloo
    shared_memory.py    the same collectives between CPU ranks of one host, without sockets
    p2p.py          channels between pipeline stages
    arrivals.py     which messages have arrived
    mesh_channel.py     the same between stages whose tensors lie differently
    ring.py         a tensor to the next rank, another from the one before
    rectangles.py   TensorShard: a local tensor and its rectangle of the logical tensor
    device_waits.py     how long a GPU stands still for messages (where the host waits: `megalite/host_waits.py`)
    patience.py     work of one rank that may take longer than the timeout of a collective

Invariant: if every axis has size 1, nothing here touches a process group, so a run in one process is the reference of
every test. Only this room and `launch` import torch.distributed.
"""

from megalite.comm.arrivals import Arrivals
from megalite.comm.autograd import (
    conjugates,
    copy_to_axis,
    gather_sequence,
    own_slice,
    reduce_from_axis,
    same,
    scatter_sum_sequence,
)
from megalite.comm.axis import Axis, ContextAxes, ExpertAxes, FamilyAxes, make_axis
from megalite.comm.collectives import (
    Done,
    Handle,
    agree_max,
    all_gather,
    all_gather_into,
    all_reduce_,
    all_to_all,
    barrier,
    device_of,
    reduce_scatter,
    reduce_scatter_into,
    start_all_to_all_rows,
)
from megalite.comm.device_waits import DeviceWaitClock, following, message_stream
from megalite.comm.exchange import Exchange, start_swap
from megalite.comm.gathered_json import GatheredJson, all_gather_json, bytes_of
from megalite.comm.mesh import ParallelMesh
from megalite.comm.mesh_channel import MeshChannel, open_channel
from megalite.comm.p2p import Channel, Incoming, MessageLabel, TensorSpec
from megalite.comm.patience import patiently
from megalite.comm.rectangles import FlatPiece, Statistic, TensorShard, range_to_rectangles, shards_of_range
from megalite.comm.ring import neighbours, start_shift
from megalite.comm.shared_memory import share_axis
from megalite.comm.world import World
