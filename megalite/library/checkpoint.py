"""What a checkpoint of a pipeline of your own holds: logical tensors by name, so that any layout loads it.

weights     masters `<name>` of what learns; parameters that do not learn and persistent buffers as they are
optimizer   `optimizer/<moment>/<name>`, `optimizer/step`
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointReader, resolve_checkpoint
from megalite.comm import Axis, ParallelMesh, TensorShard, all_gather_json, all_reduce_, shards_of_range
from megalite.engine import OLDER
from megalite.errors import CheckpointError, ConfigError
from megalite.inventory import placement_of
from megalite.library.names import stored_tensors
from megalite.library.parts import Parts
from megalite.stores import Place

STATE = "optimizer/"
STATE_KEYS = "state_keys"
"""Where a checkpoint's meta has, by the keys of the module's state dict, the names of its tensors."""


def still_shards(parts: Parts, mesh: ParallelMesh) -> Iterator[TensorShard]:
    """What no optimizer owns, in this rank's stages. The first replica writes it, from the first stage that has it."""
    stage_of = {i: stage for stage, items in enumerate(parts.cuts) for i in items}
    for key, module in parts.held.items():
        seen: set[str] = set()
        for index, layer in enumerate(module.layers, module.first):
            for _, tensor, _ in stored_tensors(layer, index):
                name = parts.names.of(tensor)
                if name in parts.names.trained or name in seen:
                    continue
                seen.add(name)
                home = (stage_of[parts.names.layers_of[name][0]], 0)
                place = placement_of(tensor)
                first = mesh.coordinate("dp") == mesh.coordinate("cp") == 0
                first = first and (bool(place.sharded) or mesh.coordinate("tp") == 0)
                copy, value = 0 if key == home and first else 1 + mesh.rank, tensor.detach()
                if place.sharded:
                    yield from shards_of_range(name, place, tuple(value.shape), value.view(-1), 0, replica=copy)
                else:
                    yield TensorShard(name, tuple(value.shape), (0,) * value.dim(), value, copy)


def read_weights(path: Place | str) -> dict[str, Tensor]:
    """The state dict of a module that `--model-module` or `ShardedOptimizer.save` has written, whole and on the CPU:
    `module.load_state_dict(megalite.read_weights("runs/mine"))`.

    path: a run's directory, of which the newest checkpoint is read, or one checkpoint. Raises CheckpointError.
    """
    reader = CheckpointReader(resolve_checkpoint(path))
    stored = reader.manifest.tensors
    names = [name for name in stored if not name.startswith((STATE, OLDER))]
    keys = reader.manifest.meta.get(STATE_KEYS)
    aliases = keys if isinstance(keys, dict) else {name: name for name in names}
    read = {name: reader.read(name) for name in names}
    return {key: read[name] for key, name in aliases.items() if name in read}


def lacking_states(found: Place, shards: Sequence[TensorShard], world: Axis) -> str:
    """What to say of a checkpoint that does not fit where all that it lacks are states, else nothing. Collective."""
    try:
        stored = CheckpointReader(found).manifest.tensors
        odd = {s.name for s in shards if s.name not in stored or tuple(stored[s.name].shape) != s.global_shape}
    except CheckpointError:
        odd = {""}
    every = {name for names in all_gather_json(sorted(odd), world) for name in names}
    if not every or not all(name.startswith(STATE) for name in every):
        return ""
    return (
        f"load: {found} has no {min(every)}: the state of another optimizer, or none; state=False takes up the weights "
        "alone"
    )


@torch.no_grad()
def write_weights(shards: list[TensorShard], values: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Writes whole tensors of a state dict into this rank's rectangles. Raises ConfigError for what does not fit."""
    given = {aliases.get(name, name): tensor for name, tensor in values.items()}
    for shard in shards:
        value = given.get(shard.name)
        if value is None:
            raise ConfigError(f"weights: {shard.name} is missing")
        if tuple(value.shape) != shard.global_shape:
            raise ConfigError(f"weights: {shard.name} is {tuple(value.shape)}, the layers have {shard.global_shape}")
        part = tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.local.shape, strict=True))
        shard.local.copy_(value[part])


def collected(own: Mapping[str, Tensor], world: Axis, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all ranks, on the CPU of each. The first rank that has one gives it; its bytes are added to
    zeros, one tensor at a time."""
    told = all_gather_json({name: [list(t.shape), str(t.dtype)] for name, t in own.items()}, world)
    found: dict[str, Tensor] = {}
    for rank, names in enumerate(told):
        for name, (shape, dtype) in names.items():
            if name not in found:
                tensor = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
                if rank == world.rank:
                    tensor.copy_(own[name])
                if tensor.numel():
                    all_reduce_(tensor.view(-1).view(torch.uint8), world)
                found[name] = tensor.cpu()
    return found
