"""What a checkpoint holds, statistics of its tensors, how two of them differ; with a few blocks of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megalite.checkpoint import CheckpointReader, Manifest, StoredTensor, committed, interrupted, read_manifest
from megalite.errors import CheckpointError
from megalite.stores import Place

Json = dict[str, Any]

_CHUNK_BYTES = 16 * 2**20


def group_of(name: str) -> str:
    """`weights`, `optimizer/exp_avg`, `previous` ...: the kind of state that a name belongs to."""
    parts = name.split("/")
    return "/".join(parts[:-1]) or "weights"


def layers_of(names: Iterable[str]) -> list[int]:
    """Numbers of the transformer layers that any of these tensors belong to, counted from 0."""
    return sorted({int(found[1]) for name in names if (found := re.search(r"\blayers\.(\d+)\.", name))})


def summarize(path: Place) -> Json:
    """Step, layout, sizes by kind of state, files and meta of one checkpoint. Raises CheckpointError."""
    manifest = read_manifest(path)
    groups: dict[str, Json] = {}
    for name, tensor in manifest.tensors.items():
        group = groups.setdefault(group_of(name), {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        group["tensors"] += 1
        group["elements"] += math.prod(tensor.shape)
        group["bytes"] += tensor.nbytes
        group["dtypes"] = sorted({*group["dtypes"], tensor.dtype})
    return {
        "path": str(path),
        "step": manifest.step,
        "save_id": manifest.save_id,
        "saved_by_ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        "groups": groups,
        "files": {
            name: {
                "bytes": file.nbytes,
                "rectangles": len(file.shards),
                "layers": layers_of(shard.tensor for shard in file.shards),
            }
            for name, file in manifest.files.items()
        },
        "extra_files": {name: entry.nbytes for name, entry in manifest.extra_files.items()},
        "meta": dict(manifest.meta),
    }


def summarize_run(directory: str) -> Json:
    """The checkpoints of a run directory, oldest first, and what interrupted saves left. Damaged ones carry `error`."""
    rows = []
    for path in committed(directory):
        try:
            manifest = read_manifest(path)
            rows.append({"name": path.name, "step": manifest.step, "bytes": manifest.nbytes})
        except CheckpointError as error:
            rows.append({"name": path.name, "error": str(error)})
    return {"path": str(directory), "checkpoints": rows, "interrupted": [path.name for path in interrupted(directory)]}


def statistics(reader: CheckpointReader, name: str) -> Json:
    """dtype, shape, minimum, maximum, mean, standard deviation and the number of values that are not finite."""
    stored = reader.manifest.tensors[name]
    count, bad, total, squares = 0, 0, 0.0, 0.0
    low, high = math.inf, -math.inf
    for box in reader.chunks(name, _CHUNK_BYTES):
        values = reader.read(name, box).double()
        finite = values[torch.isfinite(values)]
        bad += values.numel() - finite.numel()
        count += finite.numel()
        if finite.numel():
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
            total += finite.sum().item()
            squares += finite.square().sum().item()
    mean = total / count if count else None
    return {
        "dtype": stored.dtype,
        "shape": list(stored.shape),
        "bytes": stored.nbytes,
        "rectangles": sum(shard.tensor == name for file in reader.manifest.files.values() for shard in file.shards),
        "min": low if count else None,
        "max": high if count else None,
        "mean": mean,
        "std": math.sqrt(max(0.0, squares / count - mean * mean)) if mean is not None else None,
        "not_finite": bad,
    }


def differences(first: Place, second: Place) -> Json:
    """How two checkpoints differ, at whatever layouts they were saved: names, shapes, dtypes, values, meta.

    Values are equal if they are equal as numbers (NaN equals NaN). Raises CheckpointError.
    """
    a, b = CheckpointReader(first), CheckpointReader(second)
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    common = [name for name in ours if name in theirs]
    forms = {
        name: [_form(ours[name]), _form(theirs[name])] for name in common if ours[name].shape != theirs[name].shape
    }
    dtypes = {
        name: [ours[name].dtype, theirs[name].dtype]
        for name in common
        if name not in forms and ours[name].dtype != theirs[name].dtype
    }
    values = {}
    for name in common:
        if name not in forms:
            row = _value_difference(a, b, name)
            if row is not None:
                values[name] = row
    return {
        "paths": [str(first), str(second)],
        "only_first": [name for name in ours if name not in theirs],
        "only_second": [name for name in theirs if name not in ours],
        "shapes": forms,
        "dtypes": dtypes,
        "values": values,
        "equal_tensors": len(common) - len(forms) - len(dtypes.keys() | values.keys()),
        "meta": _meta_differences(a.manifest, b.manifest),
    }


def _form(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _value_difference(a: CheckpointReader, b: CheckpointReader, name: str) -> Json | None:
    """None where all values are equal."""
    differing, largest, scale = 0, 0.0, 0.0
    for box in a.chunks(name, _CHUNK_BYTES):
        x, y = a.read(name, box).double(), b.read(name, box).double()
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        differing += int(unequal.sum())
        if unequal.any():
            largest = max(largest, (x - y)[unequal].abs().nan_to_num(math.inf, math.inf).max().item())
            scale = max(scale, x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0)
    if not differing:
        return None
    return {"elements": differing, "max_abs": largest, "max_rel": largest / scale if scale else None}


def _meta_differences(a: Manifest, b: Manifest) -> Json:
    ours, theirs = dict(_flatten(a.meta)), dict(_flatten(b.meta))
    missing = "(absent)"
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = {key: [ours.get(key, missing), theirs.get(key, missing)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
