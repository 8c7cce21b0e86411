"""Offloaded activations give the same gradients, bit for bit, and hold no activation of an offloaded layer twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.errors import RuntimeFailure
from megalite.parallel.tiers import ActivationOffload, Mover, SavedTensors


def make_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3))


def offload(layers: nn.ModuleList, number: int = 3) -> ActivationOffload:
    return ActivationOffload(list(layers)[:number], SavedTensors(Mover(torch.device("cpu"))))


def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def test_gradients_are_the_same_with_two_microbatches_in_flight() -> None:
    plain, offloaded = make_layers(), make_layers()
    offload(offloaded, 2)
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for layers in (plain, offloaded):
        losses = [run(layers, x) for x in inputs]
        for loss in losses:
            loss.backward()
    for mine, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_activations_are_copied_and_weights_are_not() -> None:
    layers = make_layers()
    kept: list[Tensor] = []
    offload(layers)
    x = torch.randn(4, 8, requires_grad=True)
    weights = {p.data_ptr() for p in layers.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(layers, x)
    assert kept, "what the loss saves after the layers is left alone"
    loss = run(layers, x)
    node = loss.grad_fn
    assert node is not None
    saved = node.next_functions[0][0].next_functions[0][0]  # the last LayerNorm
    assert saved is not None
    assert saved._saved_input.data_ptr() not in weights  # type: ignore[attr-defined]
    assert saved._saved_weight.data_ptr() in weights  # type: ignore[attr-defined]


def test_update_before_backward_is_still_an_error() -> None:
    layers = make_layers()
    offload(layers)
    loss = run(layers, torch.randn(4, 8))
    with torch.no_grad():
        layers[1][0].weight.add_(1.0)  # type: ignore[index]
    with pytest.raises(RuntimeFailure, match="a weight .* inplace operation"):
        loss.backward()


def test_hooks_are_closed_when_a_layer_fails() -> None:
    layers = make_layers()
    made = offload(layers)
    with pytest.raises(RuntimeError):
        run(layers, torch.randn(4, 5))
    assert made._open == []


def test_what_is_changed_behind_its_forward_is_an_error() -> None:
    memory = SavedTensors(Mover(torch.device("cpu")))
    x = torch.ones(4, requires_grad=True)
    with memory.of(None) as saved:
        y = x.exp()  # keeps its result
    y.detach().add_(1)
    saved.evict()
    memory.settle()
    saved.prefetch()
    with pytest.raises(RuntimeFailure, match="an activation has been modified by an inplace operation"):
        y.sum().backward()


def test_a_layer_brings_back_itself_and_the_one_before() -> None:
    """Bytes on the "device", as a backward goes from layer to layer."""
    layers, memory = make_layers(), SavedTensors(Mover(torch.device("cpu")))
    ActivationOffload(list(layers), memory)
    loss = run(layers, torch.randn(4, 8))
    assert memory.now == 0 < memory.peak
    seen: list[int] = []
    for layer in layers:
        layer[2].weight.register_hook(lambda gradient: seen.append(memory.now))  # type: ignore[union-attr]
    loss.backward()
    one, two, three = seen
    assert one == two > three > 0 and memory.now == 0
