"""Messages between pipeline ranks: how tensors of a device travel over gloo, and what is kept until it has left."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist

from megalite.comm import p2p
from megalite.comm.mesh import Axis, ParallelMesh, make_axis
from megalite.comm.p2p import Channel, MessageLabel, TensorSpec
from megalite.comm.world import World
from megalite.testing import run_ranks

LABEL = MessageLabel("F", 1, 0)


def body_device_tensor(world: World) -> object:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    channel = Channel(mesh.over("pp", apart="down"), mesh.over("pp", apart="up"), [(0, 1)])
    if world.rank == 0:
        channel.send(torch.arange(3.0), peer=1, label=LABEL)
        channel.flush()
        return None
    incoming = channel.post_recv(TensorSpec((3,), torch.float32, torch.device("meta")), peer=0, label=LABEL)
    tensor = incoming.wait()
    return [str(tensor.device), incoming.buffer.tolist()]


def test_gloo_never_sees_the_memory_of_a_device() -> None:
    """The meta device stands for a GPU: what arrives, arrives in host memory, and is then copied to its place."""
    assert run_ranks(body_device_tensor, 2)[1] == ["meta", [0.0, 1.0, 2.0]]


class Sent:
    """A message of which NCCL says that it has left."""

    def __init__(self, left: bool) -> None:
        self.left, self.waited = left, False

    def is_completed(self) -> bool:
        return self.left

    def wait(self) -> None:
        self.waited = True


def test_what_has_left_is_dropped_without_waiting() -> None:
    axis = Axis("pp", 2, 0, (0, 1), "group")
    works = [Sent(left=True) for _ in range(40)]
    with (
        patch.object(p2p, "connect", lambda *_: None),
        patch.object(p2p, "device_of", lambda _: torch.device("cuda")),
        patch.object(dist, "isend", lambda *_, **__: works[len(started)]),
    ):
        channel, started = Channel(axis, axis, [(0, 1)]), []
        for work in works:
            channel.send(torch.zeros(1), peer=1, label=LABEL)
            started.append(work)
    assert not any(work.waited for work in works)
    assert len(channel._in_flight) == 0


def test_the_groups_of_a_run_on_devices_have_no_gloo() -> None:
    asked: list[object] = []
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_world_size", lambda: 8),
        patch.object(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl"),
        patch.object(dist, "new_group", lambda ranks, timeout, backend=None: asked.append(backend)),
    ):
        make_axis("tp", [[0, 1], [2, 3], [4, 5], [6, 7]], 0)
    assert asked == ["nccl"] * 4
