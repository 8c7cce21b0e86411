"""Offloaded activations give the same gradients, bit for bit, and hold no activation of an offloaded layer twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.parallel.zero.activation_offload import ActivationOffload


def make_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3))


def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def test_gradients_are_the_same_with_two_microbatches_in_flight() -> None:
    plain, offloaded = make_layers(), make_layers()
    ActivationOffload(list(offloaded)[:2])
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
    ActivationOffload(list(layers))
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
    ActivationOffload(list(layers))
    loss = run(layers, torch.randn(4, 8))
    with torch.no_grad():
        layers[1][0].weight.add_(1.0)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_hooks_are_closed_when_a_layer_fails() -> None:
    layers = make_layers()
    offload = ActivationOffload(list(layers))
    with pytest.raises(RuntimeError):
        run(layers, torch.randn(4, 5))
    assert offload._open == []
