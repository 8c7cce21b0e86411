"""Logical names: a parameter is called the same whatever stage, rank or wrapper holds it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_logical_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter) of every parameter once, in the order of definition.

    The name is `prefix` + the path inside the module, or the parameter's own `logical_name` where it has one (the
    word embedding, and the copy of it that a tied head on another stage holds).
    """
    for path, parameter in module.named_parameters():
        own = getattr(parameter, "logical_name", None)
        yield own if own is not None else (f"{prefix}.{path}" if prefix else path), parameter
