"""Hugging Face folders of all kinds in `load_for_inference`: the model that they hold, or one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.convert import CheckpointSource, HuggingFaceSource, write_huggingface
from megalite.errors import MegaliteError
from megalite.inference import load_for_inference
from megalite.train import offer_of
from tests.unit.inference.tiny_checkpoint import all_logits, write_checkpoint

IDS = list(b"The quick")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder, and the logits of the checkpoint that it was."""
    home = tmp_path_factory.mktemp("folders")
    _, stack = write_checkpoint(home / "run")
    logits = all_logits(load_for_inference(home / "run", device="cpu").model, IDS)
    torch.testing.assert_close(logits, all_logits(stack, IDS), rtol=0, atol=1e-12)
    return write_huggingface(CheckpointSource(home / "run"), home / "model"), logits


def says(**entries: Any) -> Callable[[Path], None]:
    """Changes config.json; ... takes an entry away."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({name: t.contiguous().clone() for name, t in change(load_file(path)).items()}, path)

    return rewrite


def in_two_files(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(found)}
    for file in set(places.values()):
        save_file({name: found[name] for name in found if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def through_links(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    shutil.move(folder, blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None  # type: ignore[func-returns-value]


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SAME: dict[str, Callable[[Path], None]] = {
    "as it is": lambda folder: None,
    "in two files": in_two_files,
    "through links": through_links,
    "without its tokenizer": without(*TOKENIZER),
    "without a generation_config.json": without("generation_config.json"),
    "without a model card": without("README.md"),
    "names without their prefix": tensors(lambda t: {n.removeprefix("transformer."): v for n, v in t.items()}),
    "no word on its dtype": says(dtype=..., torch_dtype=...),
    "another word on its dtype": says(dtype="bfloat16", torch_dtype="bfloat16"),
    "an architecture of another name": says(architectures=["Other"]),
    "a program that nobody runs": says(auto_map={"AutoModelForCausalLM": "code.Model"}),
}


@pytest.mark.parametrize("case", SAME)
def test_it_computes_what_the_checkpoint_did(case: str, made: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    model, expected = made
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    SAME[case](folder)
    loaded = load_for_inference(folder, device="cpu")
    assert torch.equal(all_logits(loaded.model, IDS), expected) and expected.dtype == torch.float64
    assert (loaded.iteration, loaded.consumed_samples) == (0, 0)


@pytest.mark.parametrize(("stored", "loaded_as"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)])
def test_half_precision_is_widened_on_a_cpu(
    stored: torch.dtype, loaded_as: torch.dtype, made: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    model, expected = made
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors(lambda found: {name: value.to(stored) for name, value in found.items()})(folder)
    found = load_for_inference(folder, device="cpu")
    logits = all_logits(found.model, IDS)
    assert logits.dtype == loaded_as and found.config.training.precision.half
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=0.1 * float(expected.abs().max()))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an adapter": (
        lambda folder: shutil.move(folder / "config.json", folder / "adapter_config.json"),
        "adapters of peft",
    ),
    "a pickle": (
        lambda folder: shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin"),
        "pytorch_model.bin is a pickle",
    ),
    "no weights": (without("model.safetensors"), "neither model.safetensors nor"),
    "a file less than the index names": (
        lambda folder: (in_two_files(folder), without("model-00002-of-00002.safetensors")(folder)),
        "model: model.safetensors.index.json names model-00002-of-00002.safetensors, missing there; copy all files",
    ),
    "several files without an index": (
        lambda folder: (in_two_files(folder), without("model.safetensors.index.json")(folder)),
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, but no model.safetensors.index.json; copy",
    ),
    "a family that we do not have": (says(model_type="bert"), "model_type 'bert' not supported"),
    "quantised": (says(quantization_config={"bits": 4}), "quantised weights are not supported"),
    "a smaller vocabulary": (says(vocab_size=200), "the tokenizer has 257 tokens, the model 200"),
    "one layer more": (says(n_layer=3), "tensors are missing"),
    "a tensor more": (tensors(lambda t: t | {"transformer.h.0.extra": torch.zeros(1)}), "has no transformer.h.0.extra"),
    "integers": (tensors(lambda t: {n: v.to(torch.int8) for n, v in t.items()}), "dtype I8"),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "not a safetensors file",
    ),
    "a tokenizer that is none": (write("tokenizer.json", "{}"), "not a tokenizer.json"),
    "a configuration that is none": (write("config.json", "["), "config.json"),
}  # type: ignore[dict-item]  # what the changes return is of no interest


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_is_not_is_said_in_one_line(case: str, made: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made[0], folder)
    change, line = REFUSED[case]
    change(folder)
    with pytest.raises(MegaliteError) as caught:
        load_for_inference(folder, device="cpu")
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_in_place_of_its_folder_names_the_folder(
    name: str, made: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """By the tools, by a training that takes the architecture from there, and by a conversion."""
    for read in (lambda p: load_for_inference(p, device="cpu"), lambda p: offer_of(str(p), None), HuggingFaceSource):
        with pytest.raises(MegaliteError) as caught:
            read(made[0] / name)
        assert str(caught.value) == f"--load={made[0] / name}: is a file; give its folder, {made[0]}"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(MegaliteError, match="is a file; give a run's"):
        offer_of(str(tmp_path / "notes.txt"), None)
