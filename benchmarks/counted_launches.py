"""What `launches.py` counts: the kernels of a compiled block and the bytes they move, and a step that follows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import megalite.gradient
from megalite.config import ModelConfig
from megalite.gradient import GradSink, attach_sink, sink_of
from megalite.inventory import chunk_length
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import Block
from megalite.parallel.tensor import LayerContext, LossKernels

MODEL = {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 128}
SEQUENCES = 2
_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh"}
_PRODUCTS = {"mm", "addmm", "addmm_"}


class Counting(TorchDispatchMode):
    """Counts launches while it is active: of graphs as many as their kernels, else one for each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no type
        self.launches: Counter[str] = Counter()
        self.nbytes = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs are run as such, and count their kernels themselves."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        if not func.is_view and name not in _NO_LAUNCH:
            self.launches[name] += 1
            if name not in _PRODUCTS:
                self.nbytes += sum(x.nbytes for x in (*args, made) if isinstance(x, Tensor))
        return made


class Graphs:
    """A backend of torch.compile. counting: where launches are noted."""

    def __init__(self) -> None:
        self.counting: Counting | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with config.patch(cpu_backend="triton", fx_graph_cache=False):
            return compile_fx.compile_fx(graph, inputs, inner_compile=self._cut)

    def _cut(self, graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        kernels, nbytes = kernels_of(graph, inputs, more)

        def run(values: list[Any]) -> Any:
            if self.counting is not None:
                self.counting.launches.update(kernels)
                self.counting.nbytes += nbytes
            with _disable_current_modes():
                return torch.fx.Interpreter(graph).boxed_run(values)

        run._boxed_call = True  # type: ignore[attr-defined]  # by which torch knows that it takes a list
        return run


def kernels_of(graph: torch.fx.GraphModule, inputs: Any, more: dict[str, Any]) -> tuple[Counter[str], float]:
    """Of one graph: calls of the library by name, and fused groups; the bytes that the latter read and write."""
    found: Counter[str] = Counter()
    nbytes = 0.0

    def stop(lowered: GraphLowering, *args: Any) -> Any:
        nonlocal nbytes
        lowered.init_wrapper_code()
        for node in scheduler.Scheduler(lowered.operations).nodes:
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                kind = type(node.node).__name__
                name = str(getattr(node.node, "python_kernel_name", None) or getattr(node.node, "op_overload", kind))
                found.update([] if kind == "MultiOutput" else [name])
            elif not isinstance(node, scheduler.NopKernelSchedulerNode):
                found["fused"] += 1
                nbytes += node.get_read_write_buffers_sizes()
        raise _Counted

    with patch.object(GraphLowering, "compile_to_module", stop), contextlib.suppress(_Counted):
        try:
            compile_fx.compile_fx_inner(graph, inputs, **more)
        except Exception as error:
            if not isinstance(error.__cause__, _Counted) and "_Counted" not in repr(error):
                raise
    return found, nbytes


class _Counted(Exception):
    """The graph has been cut: nothing is compiled."""


class NanoBlock(nn.Module):
    """A block as nanoGPT's: pre-norm, one projection for q, k and v, exact GELU, biases."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(h, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, s, h))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


def nanogpt(blocks: int, graphs: Graphs, sequences: int = SEQUENCES) -> tuple[Callable[[], Tensor], nn.Module]:
    """(A forward, the model) of so many blocks under autocast."""
    model = nn.Sequential(*(NanoBlock(MODEL["hidden_size"], MODEL["num_attention_heads"]) for _ in range(blocks)))
    compiled = torch.compile(model, backend=graphs)
    x = torch.randn(sequences, MODEL["seq_length"], MODEL["hidden_size"], requires_grad=True)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = compiled(x)
        return y

    return forward, model


def ours(blocks: int, graphs: Graphs, sequences: int = SEQUENCES) -> tuple[Callable[[], Tensor], nn.Module]:
    """The same of megalite."""
    return blocks_of(ModelConfig(num_layers=blocks, **MODEL), graphs, sequences)  # type: ignore[arg-type]  # a dict of int


def blocks_of(given: ModelConfig, graphs: Graphs, sequences: int) -> tuple[Callable[[], Tensor], nn.Module]:
    """(A forward, the model) of a configuration's blocks: bf16 weights, fp32 main gradients."""
    specs = [spec for spec in layer_specs(given) if spec.name.startswith("layers.")]
    model = build_stack(given, specs, LayerContext(dtype=torch.bfloat16), init_seed=1)
    for parameter in model.parameters():
        attach_sink(parameter, GradSink(torch.zeros(parameter.shape)))
    for layer in model.ordered():
        assert isinstance(layer, Block)
        layer.compile_segments(graphs)  # type: ignore[arg-type]  # a backend itself in place of its name
    b, s = sequences, given.seq_length
    x = torch.randn(s, b, given.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    places = torch.arange(s).expand(b, s)
    batch = Microbatch(places, places, places, torch.ones(b, s), torch.arange(b))
    return lambda: model(x, batch), model


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A product that adds to a wide gradient is one call there, and so is a sum of 16-bit numbers."""

    def add_product(target: Tensor, a: Tensor, b: Tensor, *, fresh: bool, scratch: Tensor | None = None) -> None:
        with _disable_current_modes():
            wide = a.float(), b.float()
        torch.mm(*wide, out=target) if fresh else target.addmm_(*wide)

    def sum_widened(x: Tensor) -> Tensor:
        return x.sum(0, dtype=torch.float32)

    linear = "megalite.parallel.tensor.linear.sum_widened"
    with patch.object(megalite.gradient, "add_product", add_product), patch(linear, sum_widened):
        yield


Model = Callable[[int, Graphs, int], tuple[Callable[[], Tensor], nn.Module]]


def counted(make: Model, blocks: int, sequences: int = SEQUENCES, *, first: bool = False) -> tuple[Counting, Counting]:
    """Of a model of so many blocks in (forward, backward) of a micro-batch, the first or a later one of a step."""
    torch._dynamo.reset()
    graphs = Graphs()
    forward, model = make(blocks, graphs, sequences)
    with as_on_a_gpu():
        y = forward()
        gradient = torch.ones_like(y)
        y.backward(gradient)
        for parameter in model.parameters() if first else ():
            parameter.grad = None
            if (sink := sink_of(parameter)) is not None:
                sink.reopen()
        graphs.counting = forwards = Counting()
        with forwards:
            y = forward()
        graphs.counting = backwards = Counting()
        with backwards:
            y.backward(gradient)
    return forwards, backwards


def of_a_block(make: Model) -> tuple[Counter[str], Counter[str]]:
    """Launches of one block between others."""
    halves = []
    for four, two in zip(counted(make, 4), counted(make, 2), strict=True):
        more = four.launches, two.launches
        halves.append(Counter({name: (more[0][name] - more[1][name]) // 2 for name in more[0]}))
    return +halves[0], +halves[1]


class Traffic(NamedTuple):
    """Bytes beside products and attention: for each token and channel, and for each weight."""

    activations: float
    weights: float

    @classmethod
    def of_a_block(cls, make: Model) -> Traffic:
        """In the only micro-batch of a step, by two numbers of tokens."""
        h, s = MODEL["hidden_size"], MODEL["seq_length"]
        few, many = (
            sum(part.nbytes for part in counted(make, 4, n, first=True))
            - sum(part.nbytes for part in counted(make, 2, n, first=True))
            for n in (2, 4)
        )
        each = (many - few) / 2 / (2 * s * h)
        return cls(each, (few / 2 - each * 2 * s * h) / (12 * h * h))


def of_a_logit(name: str) -> float:
    """Bytes for each logit of the loss, beside its products."""
    graphs, n = Graphs(), 64

    def whole(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = F.cross_entropy(F.linear(x, weight), labels)
        return loss

    def moved(rows: int) -> float:
        torch._dynamo.reset()
        labels = torch.randint(0, rows, (n,))
        graphs.counting = Counting()
        if name == "nanoGPT":
            x, weight = torch.randn(n, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
            torch.compile(whole, backend=graphs)(x, weight, labels).backward()
        else:
            kernels = LossKernels.compiled(graphs)  # type: ignore[arg-type]  # a backend itself in place of its name
            products = torch.randn(n, rows, dtype=torch.bfloat16)
            own = torch.ones(n, dtype=torch.bool)
            total, _ = kernels.statistics(products, labels, own, rows)
            kernels.gradient(products, total, labels, own, torch.ones(n), rows, 0.0)
        return graphs.counting.nbytes

    return (moved(8192) - moved(4096)) / (n * 4096)


L, H, S, T = 24, 2048, 2048, 16384
PRODUCTS, UNALIGNED, ATTENTION, MEMORY, PEAK = 680e12, 200e12, 372e12, 2.8e12, 989e12


def estimate(name: str, vocabulary: int, block: Traffic, logit: float) -> dict[str, float]:
    """Milliseconds of a step of 24 layers of width 2,048, 8 sequences of 2,048 tokens, by what it spends them on."""
    weights, head = 12.0 * L * H * H, float(vocabulary * H)
    ours = name == "megalite"
    rate = UNALIGNED if vocabulary % 8 and not ours else PRODUCTS  # megalite multiplies with its padding
    padded = -(-vocabulary // 128) * 128 if ours else vocabulary
    core = 2.0 * S * T * H * L
    chunks = -(-T // chunk_length(T, padded, on_cpu=False, compiled=True))
    # megalite: gradients of the head's weight are added up chunk by chunk, scaled, and copied to where they belong
    beside = 8.0 * chunks + 16.0 if ours else 12.0  # nanoGPT: the weight is cast, and so is its gradient
    # reads for the norm and AdamW's fused kernel; megalite's writes back scaled gradients, and bf16 weights follow it;
    # nanoGPT's clipping is a pass of its own
    update = 4.0 + 28.0 + (4.0 + 6.0 if ours else 8.0)
    found = {
        "products": 6 * T * (weights / PRODUCTS + head / rate * padded / vocabulary),
        "attention": 3.5 * core / ATTENTION,
        "elementwise": L * (block.activations * T * H + block.weights * 12 * H * H) / MEMORY,
        "loss": (logit * T * padded + beside * head) / MEMORY,
        "update": (weights + head) * update / MEMORY,
    }
    model = 6 * T * (weights + head) + 3 * core
    found["all"] = sum(found.values())
    return {key: 1e3 * seconds for key, seconds in found.items()} | {"MFU %": 100 * model / PEAK / found["all"]}
