"""Megatron-LM's `torch_dist` checkpoints, its default: whole tensors in a directory of torch.distributed.checkpoint.

iter_0000100/.metadata, __0_0.distcp, ...         no rank, stage or replica is written down; names of Transformer Engine
iter_0000100/common.pt                            args, iteration, groups of the optimizer (of 2026: an object)

    decoder.layers.mlp.linear_fc2.weight                      [L, ...]: all layers of a model whose layers are the same
    decoder.layers.3.mlp.linear_fc2.weight                    one layer of a model whose layers are not
    decoder.layers.mlp.experts.experts.linear_fc1.weight      [L, E, ...], or [E, ...] of one layer
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w, _v      one expert; the gates, and the values

A gated linear_fc1 holds all gates, then all values, whatever its tensor parallelism was.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.convert.dcp_files import FOLDER, METADATA, DcpFiles
from megalite.convert.dcp_model import DcpSource
from megalite.convert.hf_files import CONFIG
from megalite.convert.megatron_args import read_args
from megalite.convert.megatron_files import EMBEDDING, MegatronParts, MegatronSource, find_iteration
from megalite.convert.megatron_names import CORE, IGNORED, Location, Parts, is_expert, megatron_names
from megalite.errors import CheckpointError

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"
LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)", re.ASCII)
EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d{1,4})\.)?linear_(fc[12])\.(weight|bias)", re.ASCII)
HALVES = {"w": 0, "v": 1}
OPTIMIZER = "optimizer."


class MegatronDistSource(MegatronParts):
    """An iteration in Megatron-LM's format `torch_dist`: see `MegatronSource`."""

    def __init__(self, directory: Path, true_vocab_size: int | None) -> None:
        super().__init__(directory)
        self.files = DcpFiles(self.directory)
        self.common, where = self._read_common()
        args = self.common.get("args")
        if not isinstance(args, dict):
            raise CheckpointError(f"{where}: holds no args, so the number of attention heads is unknown")
        rows = next((t.shape[0] for n, t in self.files.tensors.items() if n == EMBEDDING and t.shape), 1)
        self.model = read_args(args, f"{where}: args", legacy=False, rows=max(1, rows), vocab_size=true_vocab_size)
        self.parts = self.parts_of("")
        self.check()

    def part(self, place: Location) -> Tensor:
        return self.files.read(place.name, place.at)

    def _read_common(self) -> tuple[Mapping[str, Any], str]:
        """What is stored once, and where."""
        path = self.directory / COMMON
        if not path.is_file() and COMMON_OBJECT not in self.files.objects:
            raise CheckpointError(f"{self.directory}: holds no {COMMON}: not what Megatron-LM writes")
        found = self.files.unpickler.content(path) if path.is_file() else self.files.content(COMMON_OBJECT)
        if isinstance(found, list) and len(found) == 1:  # an object is a list of what its ranks had
            (found,) = found
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: not what Megatron-LM writes")
        return found, str(path)

    def parts_of(self, prefix: str) -> dict[str, Parts]:
        """Logical name -> its parts, of the tensors whose names begin with `prefix`; "": of the weights. Raises
        CheckpointError for a name that no supported model has."""
        known, layers = megatron_names(), self.model.num_layers
        found: dict[str, dict[int | None, dict[int | None, Location]]] = {}
        for name, tensor in self.files.tensors.items():
            if not name.startswith(prefix) or (not prefix and name.startswith(OPTIMIZER)) or name.endswith(IGNORED):
                continue
            plain, half = name.removeprefix(prefix), None
            if plain[-2:] in ("_w", "_v"):
                plain, half = plain[:-2], HALVES[plain[-1]]
            layer = LAYER.fullmatch(plain)
            expert = EXPERT.fullmatch(layer[2]) if layer else None
            number = None if expert is None or expert[1] is None else int(expert[1])
            template = f"layers.{{i}}.mlp.experts.{expert[2]}.{expert[3]}" if expert else (
                known.get(CORE + layer[2] if layer else plain)
            )  # fmt: skip
            if template is None:
                raise CheckpointError(f"{self.directory}: no supported model has {name[:80]}")
            stacked = layer is not None and layer[1] is None
            if stacked and tensor.shape[:1] != (layers,):
                what = f"shape {list(tensor.shape)}, args say {layers} layers"
                raise CheckpointError(f"{self.directory}: {name[:80]}: {what}")
            for index in range(layers) if stacked else [int(layer[1]) if layer else 0]:
                ours, at = template.replace("{i}", str(index)), (index,) if stacked else ()
                halves = found.setdefault(ours, {}).setdefault(number, {})
                if half in halves:
                    raise CheckpointError(f"{self.directory}: {name[:80]} appears twice")
                entry = (tensor.dtype, tensor.shape[len(at) :])
                halves[half] = Location(self.directory / METADATA, name, at, entry)
        return {ours: _parts(ours, places) for ours, places in found.items()}


def _parts(ours: str, found: dict[int | None, dict[int | None, Location]]) -> Parts:
    """found: by expert and half, None where all are in one. Where any is missing the parts are none."""
    first = next(iter(next(iter(found.values())).values()))
    each = [found[None]] if None in found else [found.get(number, {}) for number in range(len(found))]
    places = [[halves[key] for key in (None, 0, 1) if key in halves] for halves in each]
    whole = all(halves.keys() in ({None}, {0, 1}) for halves in each)
    apart = (lambda model, t, n: t.unbind()) if is_expert(ours) and None in found else None
    return Parts(ours, first, places if whole else [], any(len(one) > 1 for one in places), apart)


def open_distributed(directory: Path, ckpt_step: int | None, vocab_size: int | None) -> MegatronDistSource | DcpSource:
    """A checkpoint in torch's distributed format: a model with a config.json beside it, or Megatron-LM's. vocab_size:
    tokens without padding, where known. Raises CheckpointError, ConfigError."""
    if (directory / CONFIG).is_file() or (directory / FOLDER).is_dir():
        if ckpt_step is not None:
            raise CheckpointError(f"`ckpt_step`={ckpt_step}: `load`={directory} is one step; drop it")
        return DcpSource(directory)
    return MegatronDistSource(find_iteration(directory, ckpt_step), vocab_size)


def open_megatron(
    directory: Path | str, ckpt_step: int | None = None, *, true_vocab_size: int | None = None
) -> MegatronSource | MegatronDistSource:
    """A checkpoint of Megatron-LM in the format that lies there: its newest iteration, `ckpt_step`, or an iteration's
    directory; see `MegatronSource`."""
    chosen = find_iteration(Path(directory), ckpt_step)
    kind = MegatronDistSource if (chosen / METADATA).is_file() else MegatronSource
    return kind(chosen, true_vocab_size)
