"""Communication: parallel axes as values, collectives over them, channels between pipeline stages.

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
