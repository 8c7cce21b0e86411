"""In what precision matrix products are computed.

A CPU without instructions for bf16 or fp16 multiplies them an order of magnitude slower than fp32 (measured on AVX2:
bf16 at 9 GFLOP/s, fp32 at 75). There the operands are widened to fp32 for the GEMM and the result is rounded back:
nothing else changes, and no digit is lost. Everywhere else GEMMs keep the precision of their operands.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.gradient import GradSink


@functools.cache
def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which tensors of `dtype` are multiplied on `device_type` ('cpu', 'cuda', ...)."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    probe = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, probe, None)
    return dtype if supported is not None and supported() else torch.float32


class Products:
    """The three products of a linear layer, of numbers as they are, multiplied in `dtype`.

    What `forward` returns beside its result is given to the others as `kept`. Weights are `[out, in]`, or `[..., out,
    in]` for several in a row.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        """x weight^T + bias, `[..., in]` -> `[..., out]`."""
        weight, bias, dtype = weight.flatten(0, -2), None if bias is None else bias.flatten(), self.dtype
        if x.dtype == dtype:
            return F.linear(x, weight, bias), None
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype), None

    def begin_backward(self, dy: Tensor, weight: Tensor, kept: Any) -> None:
        """Sends messages that the other two need, before others of the layer are under way."""

    def input_gradient(self, dy: Tensor, weight: Tensor, kept: Any) -> Tensor:
        """dy weight, `[..., out]` -> `[..., in]`."""
        weight = weight.flatten(0, -2)
        if dy.dtype == self.dtype:
            return torch.matmul(dy, weight)
        return torch.matmul(dy.to(self.dtype), weight.to(self.dtype)).to(dy.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, kept: Any) -> Tensor:
        """dy^T x of `[n, out]` and `[n, in]`, in the weight's shape and dtype."""
        return torch.mm(dy.to(self.dtype).t(), x.to(self.dtype)).to(weight.dtype).view(weight.shape)

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: Any) -> None:
        """Adds the same to a main gradient."""
        sink.addmm(dy.to(self.dtype).t(), x.to(self.dtype))


class TappedProducts(Products):
    """The same, for optimizers that look at what a weight's gradient is made of."""

    def add_weight_gradient(self, sink: GradSink, dy: Tensor, x: Tensor, kept: Any) -> None:
        if sink.tap is not None:
            sink.tap(dy, x)
        super().add_weight_gradient(sink, dy, x, kept)
