"""DeepSpeed's universal checkpoints (`ds_to_universal.py`): a folder a parameter, read through another process.

global_step100_universal/zero/model.norm.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                         mp_rank_00_model_states.pt          global_steps, global_samples

Each is a file of torch.save: a dictionary whose `param` is the tensor, or the tensor itself, flat (from ZeRO stage 3);
step.pt is a number. Names and shapes of parameters are those of the module, whatever the layout was.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalite.convert.megatron_process import Unpickler
from megalite.errors import CheckpointError

FOLDER, PARAM = "zero", "param"
STATE = "optimizer.state."
KINDS = {"fp32": "{}", **{kind: f"{STATE}{{}}.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step")}}
STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class DeepSpeedFiles:
    """Such a folder under the names that torchtitan's have in `DcpFiles`. Every method raises CheckpointError."""

    flat = True

    def __init__(self, directory: Path) -> None:
        self.directory, self._unpickler = directory, Unpickler()
        found = {kind: sorted((directory / FOLDER).glob(f"*/{kind}.pt")) for kind in KINDS}
        self._paths = {KINDS[kind].format(path.parent.name): path for kind in KINDS for path in found[kind]}

    @property
    def names(self) -> Collection[str]:
        return self._paths.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1]

    def read(self, name: str) -> Tensor:
        path = self._paths[name]
        if name.endswith(".step"):
            return torch.tensor(_number(path, self._unpickler.content(path)))
        return self._unpickler.read(path, 0, PARAM, self._entry(name))

    def _entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._unpickler.open(self._paths[name]).models[0][PARAM]

    @cached_property
    def progress(self) -> tuple[int, int] | None:
        """Iterations done and samples consumed; None where no file says so."""
        path = next((path for name in STATES if (path := self.directory / name).is_file()), None)
        if path is None:
            return None
        said = self._unpickler.content(path)
        done, samples = (
            said.get(key) if isinstance(said, dict) else None for key in ("global_steps", "global_samples")
        )
        return int(_number(path, done)), int(_number(path, samples))


def _number(path: Path, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**53 or value != int(value):
        raise CheckpointError(f"{path}: {str(value)[:40]!r} is not a number of steps or samples")
    return float(value)
