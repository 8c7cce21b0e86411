"""The grid of ranks of a run, as its configuration has it."""

import torch

from megalite.comm import DeviceWaitClock, ParallelMesh, World, all_gather_json, share_axis
from megalite.config import ParallelConfig


def make_mesh(parallel: ParallelConfig, world: World) -> ParallelMesh:
    """The grid of ranks. CPU ranks exchange through shared memory where they cut layers or experts; ranks on `meta` are
    connected to nobody."""
    mesh = ParallelMesh.build(
        rank=world.rank,
        size=world.size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context.context_parallel_size,
        cp_heads=parallel.context.traders,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.experts.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        dp_replicate=parallel.num_distributed_optimizer_instances,
        stages=parallel.meshes,
        timeout=60 * parallel.distributed_timeout_minutes,
        connects=world.device.type != "meta",
    )
    if world.local_size < world.size:
        mesh.hosts = all_gather_json(world.host, mesh.world)
    if world.device.type == "cuda":
        mesh.waits = DeviceWaitClock()
    if world.device.type == "cpu":
        for name in ("tp", "ep"):
            mesh.adopt(share_axis(mesh[name], timeout=60 * parallel.distributed_timeout_minutes))
    return mesh


def mesh_on_meta(parallel: ParallelConfig, size: int, rank: int = 0) -> ParallelMesh:
    """The grid of a run on `size` ranks as one of them would see it: for arithmetic, and to build what is looked at."""
    return make_mesh(parallel, World(rank, size, torch.device("meta"), local_size=size))
