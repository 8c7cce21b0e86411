"""Seconds of every layer and kind of computation on one device, by a roofline or from a measured profile.

A product of [m, k] and [k, n] takes 2mnk / (rate * efficiency), longer where an extent is small; everything else moves
bytes. F computes, I gives the input's gradient, W the weights'. The head computes its gradients in the forward (chunk
by chunk, so that logits never exist whole): its F has three products and its backward none. Messages of tensor
parallelism that the engine hides behind a product are counted for what sticks out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megalite.config import Config
from megalite.planner.communication import Group
from megalite.planner.hardware import Hardware
from megalite.planner.states import Precision

__all__ = ["LayerTimes", "Roofline", "TimeSource", "Times", "forward_flops_per_block"]


class Times(NamedTuple):
    """Seconds of F, I and W of one micro-batch; hidden: what a whole backward saves by overlapping messages with W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: object) -> Times:
        assert isinstance(other, Times)
        return Times(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def backward(self) -> float:
        """B = I and W together."""
        return self.backward_input + self.backward_weight - self.hidden


@dataclass(frozen=True)
class LayerTimes:
    """Of the three kinds of layers, with their tensor-parallel messages."""

    embedding: Times
    block: Times
    head: Times


class TimeSource(Protocol):
    """Where times come from: `Roofline`, or `megalite.planner.profile.Profile`."""

    def layers(self, config: Config) -> LayerTimes:
        """Times of one micro-batch through one layer of each kind."""
        ...

    def optimizer_step(self, config: Config, elements: float) -> float:
        """Seconds of norm, update and cast of so many owned elements."""
        ...

    def step_overhead(self, samples: float) -> float:
        """Seconds of a step beside layers, messages and the optimizer, with so many samples read by a rank."""
        ...


def forward_flops_per_block(config: Config) -> float:
    """FLOPs of the forward of one block for one micro-batch, whole layer, causal attention halved."""
    model = config.model
    h, q, kv, f = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
    tokens = model.seq_length * config.training.micro_batch_size
    matrices = h * (2 * q + 2 * kv) + (3 if model.gated else 2) * h * f
    return 2.0 * tokens * (matrices + model.seq_length * q)


def precision_name(config: Config) -> str:
    return config.training.precision.name


@dataclass(frozen=True)
class Roofline:
    """Times from the numbers of a hardware file."""

    hardware: Hardware

    def product(self, config: Config, m: float, n: float, k: float) -> float:
        """Seconds of one matrix product."""
        hw, e = self.hardware, Precision.of(config).compute
        rate = hw.matrix_flops[precision_name(config)] * hw.matrix_efficiency
        slower = 1 + hw.matrix_half_size / min(m, n, k)
        moved = e * (m * n + n * k + m * k) / (hw.memory_bandwidth * hw.memory_efficiency)
        return max(2 * m * n * k / rate * slower, moved) + hw.kernel_overhead

    def traffic(self, nbytes: float, kernels: int) -> float:
        """Seconds of elementwise work."""
        hw = self.hardware
        return nbytes / (hw.memory_bandwidth * hw.memory_efficiency) + kernels * hw.kernel_overhead

    def layers(self, config: Config) -> LayerTimes:
        return LayerTimes(self._embedding(config), self._block(config), self._head(config))

    def optimizer_step(self, config: Config, elements: float) -> float:
        size = Precision.of(config)
        moments = {"adam": 2, "sgd": 1, "lion": 1, "muon": 1, "adafactor": 0}[config.optimizer.optimizer]
        moved = 2 * size.gradient + 2 * size.wide * (1 + moments) + size.compute
        return self.traffic(elements * moved, 20)

    def step_overhead(self, samples: float) -> float:
        return 0.0  # data and bookkeeping are prepared while the device computes

    def _shapes(self, config: Config) -> dict[str, tuple[float, float, float]]:
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        tokens, h = model.seq_length * config.training.micro_batch_size, model.hidden_size
        q, kv, f = model.query_size / tp, model.kv_size / tp, model.ffn_size / tp
        return {
            "qkv": (tokens, q + 2 * kv, h),
            "proj": (tokens, h, q),
            "fc1": (tokens, (2 if model.gated else 1) * f, h),
            "fc2": (tokens, h, f),
        }

    def _block(self, config: Config) -> Times:
        model, tp, size = config.model, config.parallel.tensor_model_parallel_size, Precision.of(config)
        outer = tp if config.parallel.sequence_parallel else 1
        tokens, h, e = model.seq_length * config.training.micro_batch_size, model.hidden_size, size.compute
        products = {name: self.product(config, *shape) for name, shape in self._shapes(config).items()}
        matrices = sum(products.values())
        hw = self.hardware
        attention_flops = 2.0 * tokens * model.seq_length * model.query_size / tp
        attention = attention_flops / (hw.matrix_flops[precision_name(config)] * hw.attention_efficiency)
        width = (6 if model.gated else 2) * model.ffn_size / tp
        if model.position_embedding_type == "rope":
            width += 4 * (model.query_size + model.kv_size) / tp
        moved = e * tokens * (10 * h / outer + width + 4 * model.query_size / tp)
        weights = sum(n * k for _, n, k in self._shapes(config).values())
        accumulate = weights * (2 * size.gradient + (2 * e if e != size.gradient else 0))
        recomputed = attention if model.recompute_granularity == "selective" and model.attention_dropout > 0 else 0.0
        comm, hidden = self._messages(config, products)
        return Times(
            matrices + attention + self.traffic(moved, 14) + comm[0],
            matrices + 2.5 * attention + recomputed + self.traffic(1.8 * moved, 24) + comm[1],
            matrices + self.traffic(accumulate, 8),
            hidden,
        )

    def _messages(self, config: Config, products: Mapping[str, float]) -> tuple[tuple[float, float], float]:
        """((forward, backward) seconds of a block's tensor-parallel messages, what W hides of the latter)."""
        group = Group(self.hardware, config.parallel.tensor_model_parallel_size)
        model = config.model
        whole = model.seq_length * config.training.micro_batch_size * model.hidden_size * Precision.of(config).compute
        behind = [products["qkv"], products["fc1"]]
        overlap = self.hardware.overlap
        if config.parallel.sequence_parallel:
            one = group.gather(whole)
            again = sum(max(0.0, one - overlap * product) for product in behind)  # gathered while dx is computed
            return (4 * one, 4 * one + again), sum(min(one, overlap * product) for product in behind)
        one = group.all_reduce(whole)
        return (2 * one, 2 * one), sum(min(one, overlap * product) for product in behind)

    def _embedding(self, config: Config) -> Times:
        size = Precision.of(config)
        tokens, h = config.model.seq_length * config.training.micro_batch_size, config.model.hidden_size
        group = Group(self.hardware, config.parallel.tensor_model_parallel_size)
        whole = tokens * h * size.compute
        sum_up = group.gather(whole) if config.parallel.sequence_parallel else group.all_reduce(whole)
        return Times(
            self.traffic(4 * whole, 4) + sum_up,
            group.gather(whole) if config.parallel.sequence_parallel else 0.0,
            self.traffic(tokens * h * 3 * size.gradient, 4),
        )

    def _head(self, config: Config) -> Times:
        size, tp = Precision.of(config), config.parallel.tensor_model_parallel_size
        tokens, h = config.model.seq_length * config.training.micro_batch_size, config.model.hidden_size
        rows = config.padded_vocab_size() / tp
        group = Group(self.hardware, tp)
        whole = tokens * h * size.compute
        sequence = config.parallel.sequence_parallel
        logits = self.traffic(tokens * rows * (6 * size.wide + 2 * size.compute), 12)
        update = self.traffic(rows * h * size.wide * 2, 2)
        forward = 3 * self.product(config, tokens, rows, h) + logits + update + group.gather(tokens * 8 * tp)
        back = group.gather(whole) if sequence else group.all_reduce(whole)
        return Times(
            forward + (group.gather(whole) if sequence else 0.0),
            self.traffic(6 * whole, 6) + back,
            self.traffic(rows * h * 4 * size.wide, 2),
        )
