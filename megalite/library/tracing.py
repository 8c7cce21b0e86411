"""Somebody's module as a graph of operations: `torch.export` over fake tensors, so nothing is computed or copied."""

import contextlib
import io
import logging
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from megalite.errors import ConfigError
from megalite.library.tensor_cut import CutParameter

METADATA_CHECK = torch.ops.aten._assert_tensor_metadata.default


@dataclass(frozen=True)
class Traced:
    """A module's graph, which mutates what the module mutates.

    states: placeholder -> (its name in the module, parameter, buffer or constant).
    inputs: placeholders of the module's inputs, in order.
    result: the one tensor that it returns.
    root: holds the graphs that `get_attr` nodes name.
    attention: operations that a module of (*arguments, micro-batch) takes the place of.
    """

    graph: fx.Graph
    states: dict[fx.Node, tuple[str, Tensor]]
    inputs: list[fx.Node]
    result: fx.Node
    root: nn.Module
    attention: dict[fx.Node, nn.Module] = field(default_factory=dict)


class _Called(nn.Module):
    """module(*inputs) with other tensors for its parameters and buffers; the module is no submodule of this one."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._of = (module, list(names))

    def forward(self, state: list[Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        module, names = self._of
        out = functional_call(module, dict(zip(names, state, strict=True)), inputs)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{type(module).__name__}: returns {type(out).__name__}; a tensor is wanted, or something with .logits"
            )
        return logits


def trace(module: nn.Module, example: tuple[Tensor, ...], cuts: Mapping[str, CutParameter]) -> Traced:
    """The operations of `module(*example)`, with these parts in place of parameters. Raises ConfigError,
    with the line, where they depend on values."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    home = next((t.device for t in own.values() if not t.is_meta), torch.device("cpu"))
    with FakeTensorMode():
        state = [
            torch.empty(cuts[name].traced_as, dtype=tensor.dtype, device=home, requires_grad=tensor.requires_grad)
            if name in cuts
            else without_values(tensor, home)
            for name, tensor in own.items()
        ]
        inputs = tuple(without_values(tensor, home) for tensor in example)
    try:
        with _quietly(module):
            program = torch.export.export(_Called(module, list(own)), (state, inputs), strict=False)
    except (ConfigError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise ConfigError(
            f"{type(module).__name__}: {_place(error)} ends the program by sys.exit; raise an exception that says why"
        ) from None
    except Exception as error:  # whatever somebody's module raises, or torch.export about it
        more = "; is a col or a row missing in tensor_parallel?" if cuts else ""
        raise ConfigError(_reason(module, error) + more) from None
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is METADATA_CHECK and not node.users:
            graph.erase_node(node)
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    given = len(own) + len(inputs)
    lifted = arguments[: len(arguments) - given]
    constants = {node: (f"constant_{i}", _constant(program, node)) for i, node in enumerate(lifted)}
    held = [(name, cuts[name].local if name in cuts else tensor) for name, tensor in own.items()]
    states = dict(zip(arguments[len(lifted) :], held, strict=False)) | constants
    (result,) = graph.output_node().args[0]
    return Traced(graph, states, arguments[len(lifted) + len(own) :], result, program.graph_module)


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws from torch's generators."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def arguments(node: fx.Node) -> dict[str, Any]:
    """By the names of the operation's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    missing = {argument.name: argument.default_value for argument in schema.arguments if argument.name == "dim"}
    return missing | dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs


def needed_by(
    last: Iterable[fx.Node], *, given: Iterable[fx.Node] = (), through: Container[fx.Node] | None = None
) -> set[fx.Node]:
    """What `last` are computed from, up to `given`. through: what reads on; None: everything."""
    found, waiting = set(given), list(last)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes if through is None or node in through else ()
    return found


def repeatable(graph: fx.Graph, free: set[fx.Node], without: Container[fx.Node] = ()) -> set[fx.Node]:
    """The operations that depend on `free` alone and on no chance. without: operations that are none in any case."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        call = node.op == "call_function" and not is_random(node) and node not in without
        if (call or node.op == "get_attr") and all(arg in free or arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def with_devices(values: Any, device: Any) -> Any:
    """Nested arguments with `device` in place of each device."""
    return fx.node.map_aggregate(values, lambda a: device if isinstance(a, torch.device) else a)


def without_values(tensor: Tensor, device: torch.device) -> Tensor:
    """One like it, and without the weak reference that a fake copy of it would leave."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _constant(program: Any, node: fx.Node) -> Tensor:
    spec = next(spec for spec in program.graph_signature.input_specs if spec.arg.name == node.name)
    value = program.constants[spec.target]
    if not isinstance(value, Tensor):
        raise ConfigError(f"a {type(value).__name__} inside the module ({spec.target}) is no tensor, and is not cut")
    return value


@contextlib.contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    """torch.export prints the graph as far as it got; what is wrong with it is said in one line here. And transformers'
    models return a cache of keys and values unless they are told not to."""
    config: Any = getattr(module, "config", None)
    before, caches = logging.root.manager.disable, getattr(config, "use_cache", None)
    logging.disable(logging.CRITICAL)
    if caches:
        config.use_cache = False
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        if caches:
            config.use_cache = caches


def _reason(module: nn.Module, error: Exception) -> str:
    """One line: where in the user's code (or that of a library other than torch), and what."""
    where = _place(error)
    if "DataDependent" in type(error).__name__:
        return (
            f"{type(module).__name__}: {where} depends on values of the input; what is computed must be the same for "
            "every input (torch.where, or a mask)"
        )
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{type(module).__name__}: {where} cannot be traced: {first}"


def _place(error: BaseException) -> str:
    """The last line that is none of torch's."""
    theirs = Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and theirs not in Path(frame.filename).parents and frame.filename != __file__
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "somewhere inside"
