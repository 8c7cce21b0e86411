"""The split backward (Zero Bubble, arXiv 2401.10241) of layers that know nothing of it, cut from their autograd graph.

    loss -> C -> B -> A -> x        A node on a path to x is a trunk node. Its edges off the trunk lead to parameters.
            |    |    |             The first half runs the trunk for the gradient of x and notes what flows into every
            Wc   Wb   Wa            node with such edges; the second half runs those nodes again, off the trunk only.

A node computes the gradients that a backward asks it for and no others, so no product is computed twice. A parameter
with edges from several trunk nodes (tied weights) gets its gradient in the first half. What autograd saved is kept
until the second half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """One micro-batch's backward in two halves.

    end: where it begins, the summed loss or the edge of the output. x: the stage's input, a leaf; None on the first
    stage, whose whole backward is the second half: nobody waits for its first.
    """

    def __init__(self, end: Tensor | GradientEdge, x: Tensor | None) -> None:
        self._end: Tensor | GradientEdge | None = end
        self._x = x
        self._dy: Tensor | None = None
        self._arrived: list[tuple[Node, tuple[Tensor | None, ...], list[Tensor]]] = []

    def backward_input(self, dy: Tensor | None) -> Tensor | None:
        """The gradient of x. dy: that of the output, None for a loss."""
        assert self._end is not None
        root = self._end.node if isinstance(self._end, GradientEdge) else self._end.grad_fn
        trunk = set() if self._x is None or root is None else nodes_before(root, get_gradient_edge(self._x).node)
        if self._x is None or not trunk:
            self._dy = dy
            return None
        branches, shared = parameters_beside(trunk)
        hooks = [node.register_prehook(self._note(node, parameters)) for node, parameters in branches.items()]
        torch.autograd.backward(self._end, dy, inputs=[self._x, *shared], retain_graph=True)
        for hook in hooks:
            hook.remove()
        self._end = None
        return self._x.grad

    def backward_weight(self) -> None:
        """Adds the gradients of the parameters to where they go."""
        if self._end is not None:
            torch.autograd.backward(self._end, self._dy)
        for node, gradients, parameters in self._arrived:
            edges = [GradientEdge(node, i) for i, gradient in enumerate(gradients) if gradient is not None]
            torch.autograd.backward(edges, [g for g in gradients if g is not None], inputs=parameters)
        self._end, self._dy, self._arrived = None, None, []

    def _note(self, node: Node, parameters: list[Tensor]) -> Any:
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived.append((node, gradients, parameters))

        return note


def nodes_before(root: Node, leaf: Node) -> set[Node]:
    """The nodes on all paths from `root` to `leaf`, `leaf` included; none if no path leads there."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:  # depth first, a node after all that it leads to: graphs are deeper than Python recurses
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following in _following(node)]
    found: set[Node] = set()
    for node in order:
        if node == leaf or not found.isdisjoint(_following(node)):
            found.add(node)
    return found


def parameters_beside(trunk: set[Node]) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """(trunk node -> the parameters that it alone leads to off the trunk; the parameters that several lead to)."""
    owners: dict[Tensor, list[Node]] = {}
    for node in trunk:
        reached, stack = set(trunk), [node]
        while stack:
            for following in _following(stack.pop()):
                if following in reached:
                    continue
                reached.add(following)
                stack.append(following)
                if hasattr(following, "variable"):
                    owners.setdefault(following.variable, []).append(node)
    branches: dict[Node, list[Tensor]] = {}
    for parameter, nodes in owners.items():
        if len(nodes) == 1:
            branches.setdefault(nodes[0], []).append(parameter)
    return branches, [parameter for parameter, nodes in owners.items() if len(nodes) > 1]


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]
