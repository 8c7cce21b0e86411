"""What a training program does between its matrix products, as numbers: passes over memory, and what it hides.

A plan is made for megalite; a published run is predicted with the program that made it. Passes are reads and writes of
an element, of a forward; a backward makes `backward` times as many. They are counted in the programs' sources; rates of
attention are rounded values for a kernel's forward and backward, in the range that its paper shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Software:
    """One generation of programs."""

    name: str
    residual: float = 10.0  # passes over the residual stream in a block (norms, dropout, additions)
    inner: float = 2.0  # over the inputs of an MLP's second product; three times as many where it is gated
    query: float = 4.0  # over queries and context
    logits: float = 6.0  # over the loss's logits in fp32
    scores: float = 0.0  # over the scores of attention, beside its products; 0 where attention is one kernel
    backward_scores: float = 0.0
    attention: Mapping[str, float] = field(default_factory=dict)  # FLOP/s of that kernel where the hardware's is wrong
    products: Mapping[str, float] = field(default_factory=dict)  # likewise their efficiency: libraries became faster
    backward: float = 1.8
    accumulation: float | None = 0.0  # bytes of a weight's gradient beside its product, on a GPU; None: a pass adds it
    optimizer: float = 0.0  # bytes an element beside gradient, master and moments
    kernels: int = 14  # launches of a block's forward
    behind_weights: bool = True  # reductions of dx run behind dW
    interleaved: bool = False  # every message of tensor parallelism runs behind parts of its product
    whole_stages: bool = True  # each tensor-parallel rank sends a stage's output whole; else a part, gathered there
    whole_gradients: bool = False  # their gradients go back whole
    waits: int = 0  # transfers of a pass for which a stage stands still: 1 if it sends and receives at once, else 2

    @property
    def fused_attention(self) -> bool:
        return self.scores == 0.0


#: The fused update writes gradients back as it scaled them, and masters are read again for the weights.
MEGALITE = Software("megalite", optimizer=8.0)
_CUBLAS_12 = {"H100": 0.68}
_EARLY: dict[str, Any] = {
    "residual": 11.0,
    "query": 2.0,
    "logits": 12.0,
    "scores": 4.5,
    "backward_scores": 5.5,
    "optimizer": 16.0,
    "kernels": 22,
    "waits": 1,
}
"""Megatron-LM before fused attention: masked softmax, bias and GELU, bias, dropout and addition are one kernel each;
scores are written by the first product, read and written by softmax and by dropout with its mask, read by the second.
Gradients are unscaled and clipped in passes of their own. The loss makes a dozen passes over fp32 logits: copy,
maximum, difference, exponential, sum, quotient, gradient, copy."""
_ADDED_APART: dict[str, Any] = {"accumulation": None, "behind_weights": False}

MEGATRON_2021 = Software("Megatron-LM 2021", **_EARLY, **_ADDED_APART, whole_stages=False)  # arXiv 2104.04473
#: The same under DeepSpeed's pipeline engine (arXiv 2201.11990), whose source of 2021 sends activations in parts and
#: gradients whole, each by a call that the compute stream waits for.
DEEPSPEED_2021 = Software(
    "Megatron-DeepSpeed 2021", **(_EARLY | {"waits": 2}), **_ADDED_APART, whole_stages=False, whole_gradients=True
)
#: With sequence parallelism and selective recomputation (arXiv 2205.05198): products add to fp32 gradients, reductions
#: of dx run behind dW.
MEGATRON_2022 = Software("Megatron-LM 2022", **_EARLY, whole_stages=False)
#: Megatron-Core on Transformer Engine with FlashAttention 2 (arXiv 2307.08691) at 4,096 tokens;
#: messages of tensor parallelism go by parts.
MEGATRON_2024 = Software(
    "Megatron-Core 2024",
    residual=11.0,
    query=2.0,
    logits=12.0,
    attention={"H100": 292e12},
    products=_CUBLAS_12,
    interleaved=True,
    whole_stages=False,
)
#: Meta's trainer (arXiv 2407.21783): the same kernels, messages of tensor parallelism in the open in the forward.
LLAMA_2024 = Software("Llama 3 2024", residual=11.0, query=2.0, logits=12.0, products=_CUBLAS_12)
#: PyTorch FSDP over PyTorch's modules and FlashAttention's first kernels at 2,048 tokens: every operation is
#: a kernel.
TORCH_2023 = Software(
    "PyTorch 2.0",
    residual=12.0,
    query=6.0,
    logits=12.0,
    attention={"A100-80GB": 95e12, "H100": 125e12},
    products=_CUBLAS_12,
    accumulation=4.0,
    kernels=20,
)
