"""Seconds of every layer and kind of computation on one device, by a roofline or from a measured profile.

A product of [m, k] and [k, n] is cut into tiles, of which a device's multiprocessors compute one each at a time: the
last turn is rarely full, and every tile takes time to begin and to be written. (A CPU's takes 2mnk / (rate *
efficiency), longer where an extent is small.) Everything else moves bytes, as many as the program's generation does
(`planner.software`). F computes, I gives the input's gradient, W the weights'. The head computes its gradients in the
forward (chunk by chunk, so that logits never exist whole): its F has three products and its backward none. Messages of
tensor parallelism that the engine hides behind a product are counted for what sticks out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from megalite.config import OPTIMIZER_SPECS, Config
from megalite.inventory import (
    MEAN_IMBALANCE,
    ElementBytes,
    Layer,
    Product,
    context_bytes,
    expert_rows,
    grid_exchanges,
    micro_tokens,
    model_layers,
)
from megalite.planner.communication import CommGroup
from megalite.planner.float8 import rounding_passes
from megalite.planner.hardware import Hardware
from megalite.planner.software import MEGALITE, Software


class LayerTimes(NamedTuple):
    """Seconds of F, I and W of one micro-batch; hidden: what a whole backward saves by overlapping messages with W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: object) -> LayerTimes:
        assert isinstance(other, LayerTimes)
        return LayerTimes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def backward(self) -> float:
        """B = I and W together."""
        return self.backward_input + self.backward_weight - self.hidden


def add_times(times: Iterable[LayerTimes]) -> LayerTimes:
    """Layers one behind the other; those that are alike are multiplied, so that their order does not matter."""
    total = LayerTimes()
    for one, number in Counter(times).items():
        total += LayerTimes(*(number * value for value in one))
    return total


def mean_times(times: Sequence[LayerTimes]) -> LayerTimes:
    """Of one layer, where they differ."""
    counted = Counter(times).items()
    return LayerTimes(
        *(sum(number / len(times) * one[i] for one, number in counted) for i in range(len(LayerTimes._fields)))
    )


_MOST_REUSE = 256 * 128 / (256 + 128)
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""What one multiprocessor computes at a time: rows and columns of the result."""


@lru_cache(maxsize=1 << 16)
def _tiled(
    processors: float, latency: float, rate: float, elements_per_s: float, m: float, n: float, k: float, count: float
) -> float:
    """Seconds by tiles and turns, with the best tile; k may be split where there are few tiles.

    A small tile reads more for each multiply-add; a tile begins with a wait for memory and ends with its writing, half
    of which the next one hides.
    """
    best = math.inf
    for rows, columns in TILES:
        reuse = rows * columns / (rows + columns)
        speed = rate / processors * (1 + 8 / _MOST_REUSE) / (1 + 8 / reuse)
        tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
        for split in (1, 2, 4):
            turns = math.ceil(tiles * split / processors)
            written = rows * columns * processors / elements_per_s
            one = 2 * rows * columns * k / split / speed + latency + written / 2
            best = min(best, turns * one + (split > 1) * (split + 1) * m * n * count * 2 / elements_per_s)
    return best


@dataclass(frozen=True)
class Roofline:
    """Times from the numbers of a hardware file, or from measured ones (`planner.profile`). software: which program
    runs."""

    hardware: Hardware
    software: Software = MEGALITE

    def product(self, config: Config, m: float, n: float, k: float, count: float = 1, *, float8: bool = False) -> float:
        """Seconds of a matrix product, or of `count` in one call. float8: in 8 bits, where the file has its rate."""
        hw, e = self.hardware, ElementBytes.of(config).compute
        efficiency = self.software.products.get(hw.name, hw.matrix_efficiency)
        rate = hw.matrix_flops[config.training.precision.name] * efficiency
        if float8:
            rate = hw.matrix_flops.get("fp8", rate / efficiency) * efficiency
        bandwidth = hw.memory_bandwidth * hw.memory_efficiency
        moved = count * e * (m * n + n * k + m * k) / bandwidth
        if not hw.multiprocessors:
            slower = 1 + hw.matrix_half_size / min(m, n, k)
            return max(2 * m * n * k * count / rate * slower, moved) + hw.kernel_overhead
        tiled = _tiled(hw.multiprocessors, hw.tile_latency, rate, bandwidth / e, m, n, k, count)
        return max(tiled, moved) + hw.kernel_overhead

    def traffic(self, nbytes: float, kernels: int) -> float:
        """Seconds of elementwise work."""
        hw = self.hardware
        return nbytes / (hw.memory_bandwidth * hw.memory_efficiency) + kernels * hw.kernel_overhead

    def layers(self, config: Config) -> Sequence[LayerTimes]:
        """Times of one micro-batch through each of [embedding, block 0, ..., head], with its messages."""
        of_kind = {"embedding": self._embedding, "block": self._block, "head": self._head}
        whole = model_layers(config.model)
        times = {layer: of_kind[layer.kind](config, layer) for layer in dict.fromkeys(whole)}
        return [times[layer] for layer in whole]

    def optimizer_step(self, config: Config, elements: float) -> float:
        """Seconds of norm, update and cast of that many owned elements."""
        size = ElementBytes.of(config)
        rule = OPTIMIZER_SPECS[config.optimizer.optimizer]
        moments = rule.most_moments(config.optimizer)
        moved = 2 * size.gradient + 2 * size.wide * (1 + moments) + size.compute + self.software.optimizer
        orthogonal = self._orthogonalising(config) * elements if rule.orthogonal else 0.0
        return self.traffic(elements * moved, 20) + orthogonal

    def _orthogonalising(self, config: Config) -> float:
        """Seconds that Newton-Schulz steps take for an owned element, the mean of the model's. Ranks of a tensor axis
        compute the whole matrix, each of them."""
        total = seconds = 0.0
        for layer, alike in Counter(model_layers(config.model)).items():
            for each in layer.parameters:
                total += alike * math.prod(each.local(config.parallel))
                if layer.is_block and each.decay and not each.frozen and len(each.shape) > 1:
                    rows, columns = sorted(each.shape[-2:])
                    ranks = config.parallel.experts.expert_model_parallel_size if each.dealt else 1
                    matrices = alike * math.prod(each.shape[:-2]) / ranks
                    seconds += matrices * self._newton_schulz(config, rows, columns)
        return seconds / total

    def _newton_schulz(self, config: Config, rows: int, columns: int) -> float:
        """Seconds of five steps of a matrix with no more rows than columns, each of three products and of passes over
        what they make in 16 bits; before and behind them the update is made in fp32."""
        product = partial(self.product, config)
        step = product(rows, rows, columns) + product(rows, rows, rows) + product(rows, columns, rows)
        return 5 * (step + self.traffic(10.0 * rows * (rows + columns), 4)) + self.traffic(50.0 * rows * columns, 9)

    def step_overhead(self, samples: float) -> float:
        """Seconds of a step besides layers, messages and the optimizer, with that many samples read by a rank."""
        return 0.0  # data and bookkeeping are prepared while the device computes

    def _block(self, config: Config, layer: Layer) -> LayerTimes:
        model, tp, size = layer.model, config.parallel.tensor_model_parallel_size, ElementBytes.of(config)
        tokens, e = micro_tokens(config), size.compute
        outer = tp if config.parallel.sequence_parallel else 1
        products = {p.name: self._matrices(config, layer, p) for p in layer.products if not p.core}
        matrices = sum(products.values())
        attention, attention_back = self._attention(config, layer)
        ours = self.software
        width = (1.5 if model.gated else 1.0) * ours.inner * layer.mlp_width(config.parallel)
        if layer.is_sparse:  # rows are copied on their way to the experts, and added up on the way back
            width += 6.0 * expert_rows(config, layer, MEAN_IMBALANCE) / tokens * model.hidden_size
        if model.position_embedding_type == "rope":
            width += 4 * (model.query_size / tp + model.local_kv_size(tp))
        moved = e * tokens * (ours.residual * model.hidden_size / outer + width + ours.query * model.query_size / tp)
        weights = sum(math.prod(p.local(config.parallel)) for p in layer.parameters if p.decay and not p.frozen)
        accumulate = weights * self._accumulated(size)
        adapted = self._adapters(config, layer)
        eight = "fp8" in self.hardware.matrix_flops  # the rate of products in 8 bits is known
        passes = [eight * self.traffic(n, 0) for n in rounding_passes(config, layer)]
        again = model.recompute_granularity == "selective" and not ours.fused_attention
        behind = [products[product.name] for product in layer.products if product.cut == "n" and not product.core]
        if config.parallel.tp_comm_overlap:
            given = sum(behind), matrices - sum(behind), (attention, attention_back)
            forward, backward, hidden = self._taking_turns(config, layer, *given)
        else:
            forward, backward, hidden = self._messages(config, layer, behind)
        shared = self._context_messages(config, layer, attention)
        dispatched = self._expert_messages(config, layer, products) + self._shared_keys(config, layer)
        forward, backward = forward + shared[0] + dispatched, backward + shared[1] + dispatched
        return LayerTimes(
            matrices + adapted + attention + self.traffic(moved, ours.kernels) + passes[0] + forward,
            matrices
            + adapted
            + attention_back
            + again * attention
            + self.traffic(ours.backward * moved, ours.kernels * 12 // 7)
            + passes[1]
            + backward,
            (0.0 if layer.is_frozen else matrices) + adapted + self.traffic(accumulate, 8) + passes[2],
            hidden,
        )

    def _adapters(self, config: Config, layer: Layer) -> float:
        """Seconds of the products with A and with B of all adapters of a block, in one direction."""
        tokens, given = micro_tokens(config), config.parallel
        shapes = [p.local(given) for p in layer.parameters if p.family == "adapter"]
        seconds = sum(self.product(config, tokens, math.prod(rows), k) for *rows, k in shapes)
        for p in layer.parameters if layer.is_sparse and layer.is_frozen else ():
            if p.family == "expert" and not p.frozen:  # a matrix for each expert here, or one for all rows
                count, *rows, k = p.local(given)
                share = expert_rows(config, layer, MEAN_IMBALANCE) / count
                seconds += count * self.product(config, share, math.prod(rows), k)
        return seconds

    def _matrices(self, config: Config, layer: Layer, product: Product) -> float:
        """Seconds of a product of a block; of experts, of all that are on the rank, each with its share of the rows."""
        given, axes = layer.model.experts, config.parallel.experts
        n, k = product.local(product.shards(config.parallel))
        if not product.name.startswith("experts."):
            interleaved = self.software.interleaved and config.parallel.sequence_parallel
            parts = config.parallel.tensor_model_parallel_size if interleaved else 1
            eight = config.training.float8.fp8_format is not None and product.name != "router"
            parts *= 2 if config.parallel.tp_comm_overlap else 1  # each half-batch by itself
            return parts * self.product(config, micro_tokens(config) / parts, n, k, float8=eight)
        here, taken = (given.num_experts or 1) / axes.expert_model_parallel_size, given.moe_router_topk
        one = (n / taken, k) if product.cut == "n" else (n, k / taken)
        return here * self.product(config, expert_rows(config, layer, MEAN_IMBALANCE) / here, *one)

    def _expert_messages(self, config: Config, layer: Layer, products: Mapping[str, float]) -> float:
        """Seconds in which tokens travel to their experts and back, in one direction of the pass; a shared expert's
        products hide one of the two. The fullest rank receives `MEAN_IMBALANCE` times the mean, and the others wait."""
        ep = config.parallel.experts.expert_model_parallel_size
        if not layer.is_sparse or ep == 1:
            return 0.0
        group = CommGroup(self.hardware, ep, config.parallel.expert_tensor_size)
        rows = expert_rows(config, layer, MEAN_IMBALANCE)
        one = group.all_to_all(rows * (ep - 1) / ep * layer.model.hidden_size * ElementBytes.of(config).compute)
        if config.parallel.tp_comm_overlap:  # the products of the other half hide both
            return max(0.0, 2 * one - self.hardware.overlap * sum(products.values()))
        meanwhile = sum(seconds for name, seconds in products.items() if "shared_experts." in name)
        return 2 * one - min(one, self.hardware.overlap * meanwhile)

    def _shared_keys(self, config: Config, layer: Layer) -> float:
        """Seconds in which ranks that share a key/value head gather its rows, in one direction of the pass."""
        model, tokens = layer.model, micro_tokens(config)
        sharers = config.parallel.tensor_model_parallel_size // model.query_groups if model.mixer == "attention" else 1
        rows = model.qkv_size / model.query_groups
        return CommGroup(self.hardware, max(1, sharers)).gather(tokens * rows * ElementBytes.of(config).compute)

    def _accumulated(self, size: ElementBytes) -> float:
        """Bytes a weight that adding its gradient moves, beside the product."""
        apart = 2.0 * size.gradient + (2 * size.compute if size.compute != size.gradient else 0)
        added = self.software.accumulation
        return apart if added is None or self.hardware.on_cpu or size.compute == size.gradient else added

    def _attention(self, config: Config, layer: Layer) -> tuple[float, float]:
        """Seconds of attention's core in (forward, backward)."""
        model, tp, tokens = layer.model, config.parallel.tensor_model_parallel_size, micro_tokens(config)
        hw, ours = self.hardware, self.software
        if ours.fused_attention:
            rate = ours.attention.get(
                hw.name, hw.matrix_flops[config.training.precision.name] * hw.attention_efficiency
            )
            one = tokens * layer.flops(core=True) / tp / rate
            return one, 2.5 * one
        s, d, heads = model.seq_length, model.head_dim, model.num_attention_heads / tp
        count = heads * tokens / s
        nbytes = ElementBytes.of(config).compute * count * s * s
        inner, outer = self.product(config, s, s, d, count), self.product(config, s, d, s, count)
        return (
            inner + outer + self.traffic(ours.scores * nbytes, 2),
            2 * (inner + outer) + self.traffic(ours.backward_scores * nbytes, 2),
        )

    def _messages(self, config: Config, layer: Layer, behind: Sequence[float] = ()) -> tuple[float, float, float]:
        """Seconds of a layer's tensor-parallel messages in (forward, backward), and what W hides of the latter.

        behind: seconds of the products whose inputs are gathered again while dx is computed.
        """
        if config.parallel.grid is not None:
            return *grid_seconds(config, layer, self.hardware), 0.0
        group = CommGroup(self.hardware, config.parallel.tensor_model_parallel_size)
        whole = micro_tokens(config) * config.model.hidden_size * ElementBytes.of(config).compute
        overlap = self.hardware.overlap if self.software.behind_weights else 0.0
        sequence = config.parallel.sequence_parallel
        one = group.gather(whole) if sequence else group.all_reduce(whole)
        if self.software.interleaved and behind and group.size > 1:  # the first part travels in the open
            one = max(one / group.size, one - overlap * min(behind))
        hidden = sum(min(one, overlap * product) for product in behind)
        if not sequence:
            return layer.sums * one, layer.gathers * one, hidden
        again = sum(max(0.0, one - overlap * product) for product in behind)
        crossings = layer.gathers + layer.sums
        return crossings * one, crossings * one + again, hidden

    def _taking_turns(
        self, config: Config, layer: Layer, columns: float, rows: float, attention: tuple[float, float]
    ) -> tuple[float, float, float]:
        """The same where two half-batches take turns (`nn.halves`): a message of one travels while the other computes
        one turn, and what sticks out is counted. A sum travels behind a column-parallel product; what is gathered in
        front of such a product, behind attention or the second product of the MLP.

        columns, rows: seconds of the products whose outputs are cut, and whose inputs are. attention: in (forward,
        backward).
        """
        group, overlap = CommGroup(self.hardware, config.parallel.tensor_model_parallel_size), self.hardware.overlap
        half = micro_tokens(config) * config.model.hidden_size * ElementBytes.of(config).compute / 2
        sequence = config.parallel.sequence_parallel
        one = group.gather(half) if sequence else group.all_reduce(half)

        def exposed(messages: float, meanwhile: float) -> float:
            return max(0.0, 2 * messages * one - overlap * meanwhile)

        forward = exposed(layer.sums, columns) + (exposed(layer.gathers, rows + attention[0]) if sequence else 0.0)
        backward = exposed(layer.gathers, rows + attention[1]) + (exposed(layer.sums, columns) if sequence else 0.0)
        hidden = min(backward, overlap * (columns + rows))  # by the weights' gradients, where these are not put off
        if sequence:  # inputs of column-parallel products are gathered again, behind the products that give dx
            backward += max(0.0, 2 * layer.gathers * one - overlap * columns)
        return forward, backward, hidden

    def _context_messages(self, config: Config, layer: Layer, attention: float) -> tuple[float, float]:
        """Seconds of a block's messages between the ranks of a sequence, in (forward, backward). A ring's travel while
        attention is computed: forward while all but the last part of it is, backward while any is."""
        given, tp = config.parallel.context, config.parallel.tensor_model_parallel_size
        sent, kind = context_bytes(config, layer), given.cp_comm_type
        trade = CommGroup(self.hardware, given.traders, tp).all_to_all
        ring = CommGroup(self.hardware, given.ring, tp * given.traders)
        gathers = kind == "all_gather" or layer.model.mixer == "delta"
        others, overlap = given.ring - 1, self.hardware.overlap

        def exposed(nbytes: float, messages: int, compute: float) -> float:
            if gathers or not others:
                return ring.exchange(nbytes)
            return max(0.0, messages * ring.send(nbytes / messages) - overlap * compute)

        traded = trade(sent.traded)
        return (
            traded + exposed(sent.forward, others, attention * others / given.ring),
            traded + exposed(sent.backward, 2 * others, 2.5 * attention),
        )

    def _embedding(self, config: Config, layer: Layer) -> LayerTimes:
        size, numbers = ElementBytes.of(config), micro_tokens(config) * config.model.hidden_size
        forward, backward, _ = self._messages(config, layer)
        return LayerTimes(
            self.traffic(4 * numbers * size.compute, 4) + forward,
            backward,
            0.0 if layer.is_frozen else self.traffic(numbers * 3 * size.gradient, 4),
        )

    def _head(self, config: Config, layer: Layer) -> LayerTimes:
        size, tp, tokens = ElementBytes.of(config), config.parallel.tensor_model_parallel_size, micro_tokens(config)
        rows, h = layer.product("output").local(tp)
        logits = self.traffic(tokens * rows * (self.software.logits * size.wide + 2 * size.compute), 12)
        update = self.traffic(rows * h * size.wide * 2, 2)
        losses = CommGroup(self.hardware, tp).gather(tokens * 8 * tp)
        forward, backward, _ = self._messages(config, layer)
        products, later = (2, 0.0) if layer.is_frozen else (3, self.traffic(rows * h * 4 * size.wide, 2))
        once = LayerTimes(
            products * self.product(config, tokens, rows, h) + logits + update * (products > 2) + losses + forward,
            self.traffic(6 * tokens * h * size.compute, 6) + backward,
            later,
        )
        further = layer.model.further.depth  # each a block and another use of the output layer
        if not further:
            return once
        block = self._block(config, model_layers(config.model)[-2])
        return LayerTimes(*(a + further * (a + b) for a, b in zip(once, block, strict=True)))


def grid_seconds(config: Config, layer: Layer, hardware: Hardware) -> tuple[float, float]:
    """Of the messages of a layer and a micro-batch over a grid, in (forward, backward), each in the open."""
    assert config.parallel.grid is not None
    size, forward, backward = ElementBytes.of(config), 0.0, 0.0
    for each in grid_exchanges(layer, config.parallel.grid, micro_tokens(config)):
        nbytes = each.numel * (size.wide if each.wide else size.compute)
        seconds = CommGroup(hardware, each.ranks, each.stride).gather(nbytes)
        forward += each.forward * seconds
        backward += each.backward * seconds
    return forward, backward
