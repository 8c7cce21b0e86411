"""Layers out of a module of one piece: `layers_from_module`."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from megalite.comm import Axis, ContextAxes, ParallelMesh
from megalite.errors import ConfigError
from megalite.library.linearise import Part, linearise
from megalite.library.sequences import Sequences, follow_sequences, without_masks
from megalite.library.tables import check_tables, lookups
from megalite.library.tensor_check import check_parts
from megalite.library.tensor_cut import Table, TensorCut, cut_parameters, entered, rewritten
from megalite.library.tracing import METADATA_CHECK, Traced, arguments, is_random, needed_by, trace, with_devices
from megalite.microbatch import Microbatch

LINEAR, ADDMM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default
BODY = "body."
"""Before the names that parameters have in the module."""


def layers_from_module(
    module: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    mesh: ParallelMesh | None = None,
    tensor_parallel: Table | None = None,
    documents: bool = False,
) -> list[nn.Module]:
    """`module` as layers for a `Pipeline`, cut where one tensor crosses, or as few as possible.

    module: returns a tensor, or something with `.logits` (transformers' models, which are asked without a cache). It
        may be on `meta`, to look at the cut; a pipeline wants values. Its mode is kept: dropout of a module in training
        follows `layer.training`.
    example: what it is called with, one tensor or several, of the shapes that every micro-batch has.
    mesh, tensor_parallel: the grid of ranks, and which linear layers its tensor-parallel ranks share: globs of their
        names by 'col', 'row' and 'vocab' (tensor_cut.py says what these are). Collective over the mesh. Its
        context-parallel ranks share each sequence: inputs are `[b, s]`.
    documents: samples hold several documents, which attention (torch's scaled_dot_product_attention) keeps apart; the
        last tensor of each micro-batch's input is then, beside the example's, where the document of each token begins,
        int64 `[b, s]`.

    The layers hold the module's own parameters, under its own names; the composition of the layers computes what
    `module(example)` computes. Raises ConfigError, with the line, for what depends on values of the input.
    """
    axis = mesh["tp"] if mesh is not None else Axis.single("tp")
    sequences = Sequences(documents, mesh.context(gathers=False) if mesh is not None else ContextAxes())
    return layers_over(axis, module, together(example), tensor_parallel or {}, sequences, ids=None)


def together(inputs: Any) -> tuple[Tensor, ...]:
    """What the first layer takes, as a tuple. Raises ConfigError."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs) if isinstance(inputs, tuple | list) else ()
    if not given or not all(isinstance(tensor, Tensor) for tensor in given):
        named = ", by position: wrap the module in one whose forward takes them in order (docs/library.md)"
        raise ConfigError(
            f"an input is {type(inputs).__name__}; a tensor or a tuple of tensors is wanted"
            f"{named if isinstance(inputs, Mapping) else ''}"
        )
    return given


def layers_over(
    axis: Axis, module: nn.Module, example: tuple[Tensor, ...], table: Table, sequences: Sequences, *, ids: int | None
) -> list[nn.Module]:
    """The same over an axis, which to look at the cut may be without ranks to talk to. ids: those of the input are
    below it, which the module's tables must have rows for. sequences: what attention has to know; the layers are those
    of a rank's share of the example."""
    cuts = cut_parameters(module, table, axis) if axis.size > 1 else {}
    own = sequences.share(example)
    traced = trace(module, example, cuts)
    if ids is not None:
        check_tables(traced, {name: len(p) for name, p in module.named_parameters() if p.dim()}, ids)
    if sequences:
        traced = follow_sequences(trace(module, sequences.part(example), cuts), traced, sequences)
    cut = TensorCut(axis, {node: cuts[name].kind for node, (name, _) in traced.states.items() if name in cuts})
    parts, everywhere = linearise(traced, cut)
    if cuts:
        whole = trace(module, own, {})
        if traced.attention:
            without_masks(whole)
        check_parts(cut, traced, whole)
    keys: dict[int, tuple[str, ...]] = {}
    stored = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    held = {id(parameter): cuts[name].local for name, parameter in module.named_parameters() if name in cuts}
    for name, tensor in list(stored.items()):
        stored[name] = tensor = held.get(id(tensor), tensor)
        keys[id(tensor)] = (*keys.get(id(tensor), ()), name)
    tables = frozenset(id(stored[name]) for name, _ in lookups(traced) if name in stored)
    for region in traced.root.children():
        if isinstance(region, fx.GraphModule):
            _take_device(region)
    layers: list[nn.Module] = []
    for part in parts:
        layer = TracedLayer(part, everywhere, traced, keys, cut)
        layer.sequences, layer.tables = sequences, tables
        layers.append(layer.train(module.training))
    used = {id(tensor) for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]}
    for name, tensor in stored.items():
        if id(tensor) not in used:
            used.add(id(tensor))
            layers[0].keep(name, tensor, keys[id(tensor)])  # type: ignore[operator]  # a TracedLayer
    return layers


class TracedLayer(nn.Module):
    """Consecutive operations of a module.

    keys: what the module's state dict calls each of its tensors; nothing for what it does not hold, or what a layer
        before this one answers for.
    reads: numbers of the module's inputs that it needs besides what arrives.
    ranks: how many share the module's linear layers. sequences: what its attention was told. tables: `id` of each
    tensor of the module in which rows are looked up.
    """

    sequences = Sequences()
    tables: frozenset[int] = frozenset()

    def __init__(
        self, part: Part, everywhere: set[fx.Node], traced: Traced, keys: dict[int, tuple[str, ...]], cut: TensorCut
    ) -> None:
        super().__init__()
        self.ranks = cut.axis.size if cut.kinds else 1
        # the operations of the part and what it repeats, with all that they read
        through = everywhere | set(part.chain)
        needed = needed_by([*part.chain, *part.leaves], given=part.arrives, through=through)
        first = part.arrives == traced.inputs
        inputs = [] if first else [node for node in traced.inputs if node in needed]
        self.reads = [traced.inputs.index(node) for node in inputs]
        graph, held = _extract(part, [*part.arrives, *inputs], needed, traced, cut)
        self.body = fx.GraphModule(held, graph)
        self.keys = {
            name: keys.get(id(tensor), ()) if isinstance(tensor, nn.Parameter) else keys.pop(id(tensor), ())
            for name, tensor in held.items()
            if isinstance(tensor, Tensor)
        }

    def forward(self, *x: Tensor, inputs: Sequence[Tensor] = (), microbatch: Microbatch | None = None) -> Any:
        """A tensor, or a tuple where several cross. microbatch: for attention that asks it."""
        out = self.body(*x, *(inputs[i] for i in self.reads), self.training, x[0].device, microbatch)
        return out[0] if len(out) == 1 else out

    def keep(self, name: str, tensor: Tensor, keys: tuple[str, ...]) -> None:
        """Holds a tensor of the module that nothing is computed with: it is saved, and not trained."""
        owner: nn.Module = self.body
        *path, leaf = name.split(".")
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_buffer(leaf, tensor.detach())
        self.keys[name] = keys


class Product(nn.Module):
    """A linear layer of a traced graph: `x weight^T + bias`, or with `turned` (transformers' Conv1D) `x weight + bias`.
    A stage may replace how its gradients are computed."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False) -> Tensor:
        return product(x, weight, bias, turned=turned)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool) -> Tensor:
    """As torch computes it, backward and all."""
    if not turned:
        return nn.functional.linear(x, weight, bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _splits(node: fx.Node, traced: Traced, cut: TensorCut) -> bool:
    """Whether nothing but this linear layer uses its weight and its bias."""
    if node.target is LINEAR:
        states = node.args[1:]
    elif node.target is ADDMM and not node.kwargs:
        states = (node.args[2], node.args[0])
    else:
        return False
    for state in [state for state in states if state is not None]:
        if not isinstance(state, fx.Node) or state not in traced.states or (node, state) in cut.entries:
            return False
        if len(state.users) > 1 or not isinstance(traced.states[state][1], nn.Parameter):
            return False
    return True


def _extract(
    part: Part, arguments: Sequence[fx.Node], needed: set[fx.Node], traced: Traced, cut: TensorCut
) -> tuple[fx.Graph, dict[str, Any]]:
    """The part as a graph (*arguments, training, device, micro-batch) -> tuple of what leaves, and what its get_attr
    nodes name."""
    graph, held = fx.Graph(), dict[str, Any]()
    copies = {node: graph.placeholder(f"x{i}") for i, node in enumerate(arguments)}
    training, device, microbatch = (graph.placeholder(name) for name in ("training", "device", "microbatch"))
    for node in traced.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node in traced.states:
            name, held_as = traced.states[node]
            held[name], copies[node] = held_as, graph.get_attr(name)
        elif node.op == "get_attr":
            held[node.target], copies[node] = getattr(traced.root, node.target), graph.get_attr(node.target)
        elif node.op == "call_function":
            whole = {old: copies[old] for old in node.all_input_nodes}
            read = {
                old: entered(graph, copy, cut, held) if (node, old) in cut.entries else copy
                for old, copy in whole.items()
            }
            if node in traced.attention:
                held[f"attend_{len(held)}"] = traced.attention[node]
                copies[node] = graph.call_module(f"attend_{len(held) - 1}", (*(read[a] for a in node.args), microbatch))
                continue
            made = copies[node] = graph.node_copy(node, lambda old, read=read: read[old])  # type: ignore[misc]  # lambda
            made.meta = {}
            made.args, made.kwargs = with_devices((made.args, made.kwargs), device)
            read_from = [held[str(arg.target)] for arg in node.all_input_nodes if arg.op == "get_attr"]
            if any(isinstance(region, fx.GraphModule) for region in read_from):
                made.args = (*made.args, device)
            _follow_mode(graph, made, training)
            if _splits(node, traced, cut):
                name = f"product_{len(held)}"
                held[name], plain, args = Product(), made, made.args
                if node.target is ADDMM:
                    made = graph.call_module(name, (args[1], args[2], args[0]), {"turned": True})
                else:
                    made = graph.call_module(name, args)
                graph.erase_node(plain)
                copies[node] = made
            if cut.kind(node):
                copies[node] = rewritten(graph, node, made, cut, held)
    graph.output(tuple(copies[node] for node in part.leaves))
    return graph, held


def _take_device(region: fx.GraphModule) -> None:
    """Gives a region under no_grad or autocast an argument for the devices that stand in it."""
    for node in [node for node in region.graph.nodes if node.target is METADATA_CHECK]:
        region.graph.erase_node(node)
    for node in [node for node in region.graph.nodes if node.op == "get_attr"]:
        raise ConfigError(f"{node.target}: a region under no_grad or autocast inside another one is not cut")
    after = next(node for node in region.graph.nodes if node.op != "placeholder")
    with region.graph.inserting_before(after):
        device = region.graph.placeholder("device")
    for node in region.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = with_devices((node.args, node.kwargs), device)
    region.recompile()


def _follow_mode(graph: fx.Graph, node: fx.Node, training: fx.Node) -> None:
    """What was traced in training computes as in evaluation once the layer is: dropout, statistics of batches."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    args = list(node.args)
    for i, argument in enumerate(schema.arguments[: len(args)]):
        if argument.name in ("train", "training") and args[i] is True:
            args[i] = training
        elif argument.name == "dropout_p" and args[i]:
            args[i] = _times(graph, node, args[i], training)
    counter = str(getattr(args[0], "target", "")) if args else ""
    if node.target is torch.ops.aten.add_.Tensor and args[1] == 1 and counter.endswith("num_batches_tracked"):
        args[1] = _times(graph, node, 1, training)
    node.args = tuple(args)
    if node.kwargs.get("dropout_p"):
        node.kwargs = {**node.kwargs, "dropout_p": _times(graph, node, node.kwargs["dropout_p"], training)}


def _times(graph: fx.Graph, before: fx.Node, number: Any, training: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        return graph.call_function(operator.mul, (number, training))


def draws(layer: nn.Module) -> bool:
    """Whether a layer in training draws random numbers; one that was not traced may."""
    if not isinstance(layer, TracedLayer):
        return True
    for node in (node for m in layer.modules() if isinstance(m, fx.GraphModule) for node in m.graph.nodes):
        given = arguments(node)
        dropout = "dropout" in str(node.target) or "dropout_p" in given
        if given.get("dropout_p", given.get("p", 0.0)) if dropout else is_random(node):
            return True
    return False
