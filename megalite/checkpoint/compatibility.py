"""Does the checkpoint fit this model, and its optimizer state this run? All differing flags in one message.

Parallel and training flags may differ freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.format import StoredTensor
from megalite.config import Config, ModelConfig, architecture_differences
from megalite.errors import CheckpointError
from megalite.inventory import stage_parameters

# Flags of the optimizer that decide which tensors its state has, and in which dtype they are kept.
_STATE = ("optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_model(saved: ModelConfig, now: ModelConfig, where: str) -> None:
    """Raises CheckpointError naming every flag in which the checkpoint's model differs.

    where: how the message begins, e.g. `--load=runs/a`.
    """
    differing = architecture_differences(saved, now)
    if differing:
        raise CheckpointError(
            f"{where}: model differs from checkpoint: {_listed(differing)}; use the checkpoint's values, or "
            "--use-checkpoint-args"
        )


def check_tensors(model: ModelConfig, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Raises CheckpointError where a checkpoint does not hold the weights of the model that it describes.

    Asked before anything of the model's size is allocated: what a checkpoint can demand is bounded by what it holds.
    """
    if not model.vocab_size or model.num_layers > len(tensors):
        size = f"{model.num_layers} layers and a vocabulary of {model.vocab_size}"
        raise CheckpointError(f"{where}: damaged ({len(tensors)} tensors cannot be {size})")
    for name, parameter in stage_parameters(model, range(model.num_layers + 2)):
        stored = tensors.get(name)
        if parameter.frozen:  # beside adapters: stored where they were before
            continue
        if stored is None or stored.shape != tuple(parameter.shape):
            held = "holds none" if stored is None else f"holds {list(stored.shape)}"
            raise CheckpointError(
                f"{where}: damaged ({name} is {list(parameter.shape)} by its configuration, and it {held})"
            )


def check_state(saved: Config, now: Config, where: str) -> None:
    """Raises CheckpointError where a run of `now` cannot use the optimizer state of `saved`."""
    pairs = {name: (getattr(now.optimizer, name), getattr(saved.optimizer, name)) for name in _STATE}
    pairs["fp64"] = now.training.precision.fp64, saved.training.precision.fp64
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        raise CheckpointError(
            f"{where}: its optimizer state differs: {_listed(differing)}; use the checkpoint's values, or "
            "start with fresh optimizer state (--no-load-optim)"
        )


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """field -> (value now, value in the checkpoint), as text."""
    texts = {
        name: [str(v).lower() if v in (None, True, False) else str(v) for v in pair] for name, pair in differing.items()
    }
    return ", ".join(f"--{n.replace('_', '-')}={ours} (checkpoint {theirs})" for n, (ours, theirs) in texts.items())
