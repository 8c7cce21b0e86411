"""In what precision matrix products are computed.

A CPU without instructions for bf16 or fp16 multiplies them an order of magnitude slower than fp32 (measured on AVX2:
bf16 at 9 GFLOP/s, fp32 at 75). There the operands are widened to fp32 for the GEMM and the result is rounded back:
nothing else changes, and no digit is lost. Everywhere else GEMMs keep the precision of their operands.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which tensors of `dtype` are multiplied on `device_type` ('cpu', 'cuda', ...)."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    probe = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, probe, None)
    return dtype if supported is not None and supported() else torch.float32
