"""Layers that predict further tokens: a folder's come back bit by bit, and their losses have the gradients of
transformers' in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface
from megalite.errors import CheckpointError
from megalite.inference.loaded_model import load_for_inference
from megalite.inventory import parameter_shapes, placement_of
from megalite.train.further import Further
from tests.unit.convert.double_transformers import DoubleTorch, double_transformers
from tests.unit.convert.family_cases import CASES, S
from tests.unit.convert.test_families import batch, difference, kind_of, peer, tokens

transformers = pytest.importorskip("transformers", minversion="5.20", reason="its older versions have no such layers")
RENAMED = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
DEPTH, FACTOR = 2, 0.1


def stored(layer: Any, index: int, main: Any) -> dict[str, Tensor]:
    """One of its layers as files have it."""
    found = {}
    for name, value in layer.named_parameters():
        for before, after in RENAMED.items():
            name = name.replace(before, after)
        value = value.detach().clone()
        if name.endswith("gate_up_proj"):
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                found |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"mlp.experts.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            found[name] = value
    found |= {name.replace("mtp_block.", ""): value for name, value in layer.named_buffers() if "e_score" in name}
    found |= {"embed_tokens.weight": main.model.embed_tokens.weight, "shared_head.head.weight": main.lm_head.weight}
    return {f"model.layers.{index}.{name}": value.detach().clone().contiguous() for name, value in found.items()}


def their_folder(case: str, folder: Path, main: Any, further: Any) -> None:
    main.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for k, layer in enumerate(further.layers):
        tensors |= stored(layer, main.config.num_hidden_layers + k, main)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def built(case: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    from transformers import modeling_layers

    monkeypatch.setattr(modeling_layers, "torch", DoubleTorch(), raising=False)
    kind, values = CASES[case]
    monkeypatch.setitem(CASES, case, (kind, values | dict(num_nextn_predict_layers=DEPTH)))
    main = peer(case)
    torch.manual_seed(8)
    with double_transformers(kind_of(case)):
        further = modeling_layers.MtpModel(main, DEPTH).double().eval()
    with torch.no_grad():
        for parameter in further.layers.parameters():
            noise = 0.2 * torch.randn_like(parameter)
            # transformers leaves matrices of routers and experts as memory happens to be
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    return main, further


def their_loss(main: Any, further: Any) -> Tensor:
    """The next token's sum, and the further means times its number of tokens."""
    ids, hidden = tokens(), main.model(input_ids=tokens()).last_hidden_state
    places = torch.arange(S).expand(2, S)
    mask = torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turned = further.rotary_emb(hidden, position_ids=places)
    loss = F.cross_entropy(main.lm_head(hidden).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")
    for k, layer in enumerate(further.layers, 1):
        e = main.model.embed_tokens(ids.roll(-k, 1))
        hidden = layer(e, hidden, position_embeddings=turned, attention_mask=mask, position_ids=places, cache=None)
        logits, labels = main.lm_head(hidden)[:, : S - k], ids.roll(-k - 1, 1)[:, : S - k]
        mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss + FACTOR / DEPTH * 2 * S * mean
    return loss


@pytest.mark.parametrize("case", ["deepseek", "glm"])
def test_a_step_is_theirs_and_the_folder_comes_back(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, further = built(case, monkeypatch)
    their_folder(case, tmp_path / "there", main, further)
    with double_transformers(kind_of(case)):
        their_loss(main, further).backward()
    write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    model = load_for_inference(tmp_path / "ours", device="cpu").model.requires_grad_()
    (microbatch,) = Further(DEPTH, None, torch.float64)([batch()])
    model(None, microbatch).backward()

    with torch.no_grad():
        for parameter in (*main.parameters(), *further.layers.parameters()):
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    their_folder(case, tmp_path / "gradients", main, further)
    source = HuggingFaceSource(tmp_path / "gradients")
    expected = {name: source.read(name) for name in parameter_shapes(source.model)}
    unit = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    found = dict(model.logical_parameters())
    assert found.keys() == expected.keys() and any("mtp.layers.1.block" in name for name in found)
    for name, parameter in found.items():
        assert parameter.grad is not None, name
        own = parameter.grad[tuple(slice(n) for n in placement_of(parameter).valid_shape(tuple(parameter.shape)))]
        assert difference(own, expected[name], unit) < 1e-12, name

    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_copy_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, further = built("glm", monkeypatch)
    their_folder("glm", tmp_path / "there", main, further)
    path = tmp_path / "there" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.4.embed_tokens.weight"][3, 3] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.4.embed_tokens.weight is not model.embed_tokens.weight"):
        write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
