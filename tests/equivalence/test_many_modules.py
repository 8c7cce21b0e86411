"""Architectures that `layers_from_module` has met: the layers compute what the module computes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.library import layers_from_module

SIZES = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=3, vocab_size=40)
GROUPED = dict(SIZES, num_key_value_heads=1)
STILL = dict(SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
IMAGES = dict(STILL, image_size=16, patch_size=4)
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Bloom": ("ForCausalLM", dict(hidden_size=16, n_layer=2, n_head=2, vocab_size=40)),
    "Mixtral": ("ForCausalLM", dict(GROUPED, num_local_experts=4)),
    "Qwen3": ("ForCausalLM", dict(GROUPED, head_dim=8)),
    "Phi3": ("ForCausalLM", dict(GROUPED, pad_token_id=0)),
    "Bert": ("ForMaskedLM", STILL),
    "ViT": ("ForImageClassification", IMAGES),
}


class UNet(nn.Module):
    """Three skips, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 8, 12]
        self.down = nn.ModuleList(nn.Conv2d(widths[i], widths[i + 1], 3, 2, 1) for i in range(3))
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * widths[i], widths[i - 1], 2, 2) for i in (3, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.cells(x)[0])
        return y


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "UNet":
        return UNet(), torch.randn(2, 3, 16, 16)
    if kind == "Recurrent":
        return Recurrent(), torch.randn(2, 5, 6)
    if kind == "Encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(5, 2, 16)
    import transformers

    end, settings = THEIRS[kind]
    module: nn.Module = getattr(transformers, kind + end)(getattr(transformers, f"{kind}Config")(**settings))
    return module, torch.randn(2, 3, 16, 16) if kind == "ViT" else torch.randint(40, (2, 8))


@pytest.mark.full
@pytest.mark.parametrize("kind", [*THEIRS, "UNet", "Recurrent", "Encoder"])
def test_the_layers_compute_what_the_module_computes(kind: str) -> None:
    module, example = made(kind)
    layers: list[Any] = layers_from_module(module, example)
    x: Any = (example,)
    for layer in layers:
        x = layer(*x, inputs=(example,))
        x = x if isinstance(x, tuple) else (x,)
    expected = module(example)
    assert torch.equal(x[0], expected if isinstance(expected, Tensor) else expected.logits)
    assert {key for layer in layers for keys in layer.keys.values() for key in keys} == module.state_dict().keys()
