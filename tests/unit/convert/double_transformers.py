"""transformers in fp64 throughout: its norms, rotary angles, softmax and routers ask for fp32 by name, and get fp64.

Without that a comparison ends at 2e-5, which hides a wrong epsilon, a scale that is rounded, a missing temperature.
Attention and experts must be "eager": the library's other kernels have no fp64, or take fp32 sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class DoubleTorch:
    """torch, except that its fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def double_transformers(kind: type) -> Iterator[None]:
    """Models of class `kind` that are built and run inside compute in fp64. Nothing of ours may run in it."""
    places = sys.modules[kind.__module__], sys.modules["transformers.modeling_rope_utils"]
    usual = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, usual)
        torch.set_default_dtype(torch.float64)  # numbers that are made tensors
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for place in places:
            stack.enter_context(mock.patch.object(place, "torch", DoubleTorch()))
        yield
