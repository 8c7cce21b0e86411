"""tools/convert_checkpoint.py as users call it, and what becomes of its output: generation, export, a run."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import megalite
from megalite import strangers
from megalite.checkpoint import Checkpointer, CheckpointReader, resolve_checkpoint
from megalite.comm import Axis, TensorShard
from megalite.config import to_dict
from megalite.config.model_parts import ForeignModule
from megalite.convert import AdaptedSource, hf_files
from megalite.convert.registry import config_around
from megalite.data import ByteTokenizer, NullTokenizer, make_tokenizer
from megalite.errors import ConfigError
from megalite.inference.loaded_model import load_for_inference
from megalite.inventory.layers import parameter_shapes
from pretrain_gpt import main as pretrain
from tests.unit.convert.chat_model import save_model
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.inference.tiny_checkpoint import tiny_model_config, write_checkpoint
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
LLAMA: dict[str, Any] = dict(
    model_type="llama", position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
    ffn_hidden_size=24, add_bias_linear=False, untie_embeddings_and_output_weights=True, num_query_groups=1,
)  # fmt: skip
MODEL_FLAGS = (
    "--model-type llama --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 "
    "--num-query-groups 1 --seq-length 16 --device cpu --num-workers 0"
)
RUN_FLAGS = "--micro-batch-size 2 --lr 1e-3 --train-iters 2 --eval-iters 0 --tokenizer-type ByteTokenizer --split 1,0,0"

Convert = Callable[..., tuple[int, str, str]]


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Convert:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", ROOT / "tools" / "convert_checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*flags: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_tool(module.main, [str(flag) for flag in flags])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
def test_export_is_verified_and_comes_back_bit_equal(changes: Any, convert: Convert, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_checkpoint(tmp_path / "run", model=tiny_model_config(**changes))
    status, out, error = convert(
        "--from", "megalite", "--to", "hf", "--load", tmp_path / "run", "--save", tmp_path / "hf", "--verify"
    )
    assert status == 0, error
    assert "verify: largest difference of logits" in out

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def f(x): return 'äö — 𝕏'"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 256
    names = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert names["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 256

    assert convert("--from", "hf", "--to", "megalite", "--load", tmp_path / "hf", "--save", tmp_path / "b")[0] == 0
    before, after = (CheckpointReader(resolve_checkpoint(tmp_path / name)) for name in ("run", "b"))
    weights = list(parameter_shapes(load_for_inference(tmp_path / "run").config.model))
    assert sorted(after.names) == sorted(weights)
    assert all(torch.equal(before.read(name), after.read(name)) for name in weights)
    assert load_for_inference(tmp_path / "b").tokenizer.encode(text) == list(text.encode())


def test_verify_tells_a_wrong_weight(convert: Convert, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_checkpoint(tmp_path / "run")
    convert("--from", "megalite", "--to", "hf", "--load", tmp_path / "run", "--save", tmp_path / "hf")
    from transformers import GPT2LMHeadModel

    original = GPT2LMHeadModel.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.transformer.h[0].attn.c_attn.weight.data.mul_(1.5)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "forward", wrong)
        status, _, error = convert(
            "--from", "hf", "--to", "megalite", "--load", tmp_path / "hf", "--save", tmp_path / "c", "--verify"
        )
    assert status == 1 and "--verify: logits differ by" in error


def test_dtype_and_same_side_conversion(convert: Convert, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", model=tiny_model_config(**LLAMA))
    sides = "--from", "megalite", "--to", "megalite"
    assert convert(*sides, "--load", tmp_path / "run", "--save", tmp_path / "half", "--dtype", "bf16")[0] == 0
    half = CheckpointReader(resolve_checkpoint(tmp_path / "half"))
    assert {half.read(name).dtype for name in half.names} == {torch.bfloat16}
    assert convert("--from", "megalite", "--to", "hf", "--load", tmp_path / "half", "--save", tmp_path / "hf")[0] == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    norm = half.read("head.final_norm.weight")
    assert torch.equal(stored["model.norm.weight"], norm)


@pytest.mark.parametrize("changes", [{}, LLAMA | {"num_query_groups": 2}], ids=["gpt", "llama"])
def test_megatron_and_back(
    changes: Any, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """All sides after one another: what comes out at the end is what went in."""
    if not full:
        monkeypatch.setattr(strangers, "Popen", HereInstead)
    write_checkpoint(tmp_path / "run", model=tiny_model_config(**changes))
    grid = "--target-tensor-model-parallel-size", "2", "--target-pipeline-model-parallel-size", "2"
    there, hf, back = tmp_path / "megatron", tmp_path / "hf", tmp_path / "back"
    legacy = "--target-transformer-impl", "legacy"
    steps = [
        ("megalite", tmp_path / "run", "megatron", there, grid),
        ("megatron", there, "hf", hf, ("--trust-pickle",)),
        ("hf", hf, "megatron", tmp_path / "older", legacy),
        ("megatron", tmp_path / "older", "megatron", tmp_path / "newer", ("--trust-pickle", *grid)),
        ("megatron", tmp_path / "newer", "megalite", back, ("--trust-pickle",)),
    ]
    for source, load, target, save, more in steps:
        status, out, error = convert("--from", source, "--to", target, "--load", load, "--save", save, *more)
        wrote, *more_lines = out.splitlines()
        assert status == 0 and wrote == f"wrote {save / 'iter_0000000' if save == back else save}", error
        assert all(target == "megatron" and line.startswith("with the tokenizer; ") for line in more_lines)
    before, after = (CheckpointReader(resolve_checkpoint(tmp_path / name)) for name in ("run", "back"))
    assert sorted(after.names) == sorted(parameter_shapes(load_for_inference(back).config.model))
    assert all(torch.equal(before.read(name), after.read(name)) for name in after.names)

    status, _, error = convert("--from", "megatron", "--to", "megalite", "--load", there, "--save", tmp_path / "x")
    assert status == 2 and error.count("\n") == 1
    assert "are pickles, which can carry programs" in error and "add --trust-pickle" in error
    status, _, error = convert("--from", "megalite", "--to", "hf", "--load", there, "--save", tmp_path / "x")
    assert status == 2 and "convert_checkpoint.py --from megatron --to megalite --trust-pickle makes one of it" in error


def test_verify_of_rounded_weights_is_as_sharp(convert: Convert, tmp_path: Path) -> None:
    """Rounding every weight to bf16 moves logits a thousand times further than the order of sums does."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_checkpoint(tmp_path / "run", model=tiny_model_config(**LLAMA))
    for source, load, target, save in (("megalite", "run", "hf", "hf"), ("hf", "hf", "megalite", "back")):
        status, out, error = convert(
            "--from", source, "--to", target, "--load", tmp_path / load, "--save", tmp_path / save,
            "--dtype", "bf16", "--verify",
        )  # fmt: skip
        assert status == 0, error
        assert float(out.split("difference of logits ")[1].split(",")[0]) < 1e-5


def test_adapters_of_a_bf16_model_are_merged_and_rounded_once(convert: Convert, tmp_path: Path) -> None:
    """--verify passes, the file is the same with and without the dtype named, and the dtype is said."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    save_model(tmp_path / "base", num_hidden_layers=2, dtype="bfloat16")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = [
        *"--use-checkpoint-args --seq-length 16 --device cpu --num-workers 0 --bf16 --lora-rank 4".split(),
        *RUN_FLAGS.replace("1e-3", "0.1").split(), "--data-path", str(tmp_path / "text.txt"),
        "--data-cache-path", str(tmp_path / "cache"), "--load", str(tmp_path / "base"), "--save", str(tmp_path / "run"),
    ]  # fmt: skip
    assert pretrain(flags) == 0
    sides = "--from", "megalite", "--to", "hf", "--load", tmp_path / "run", "--verify"
    stored = []
    for save, more in (("stored", ()), ("named", ("--dtype", "bf16")), ("wide", ("--dtype", "fp32"))):
        status, out, error = convert(*sides, "--save", tmp_path / save, *more)
        assert status == 0 and "Loading" not in error, error
        assert ("written as bf16, the dtype of the base model" in out) == (save == "stored")
        stored.append(load_file(tmp_path / save / "model.safetensors"))
    asis, named, wide = stored
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, exact in wide.items():
        assert torch.equal(asis[name], exact.bfloat16()) and torch.equal(named[name], asis[name]), name
    changed = [name for name in base if not torch.equal(base[name], asis[name])]
    assert len(changed) == 14, "all linear layers"
    status, out, _ = convert("--from", "megalite", "--to", "peft", "--load", tmp_path / "run", "--save", tmp_path / "a")
    assert status == 0 and "then PeftModel.from_pretrained(base, " in out
    check_a_base_that_has_moved(convert, tmp_path, sides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptedSource, "merged", lambda source, name: 1.5 * source._base.read(name).float())
        status, _, error = convert(*sides, "--save", tmp_path / "wrong")
    assert status == 1 and "adapters merged and beside the base" in error, "a wrong merge is not taken for rounding"


def test_verify_of_adapters_beside_8_bits(convert: Convert, tmp_path: Path) -> None:
    """The merged weights are the dequantised ones with the adapters, and no codes take their place."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    save_model(tmp_path / "base", num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = [
        *"--use-checkpoint-args --seq-length 16 --device cpu --num-workers 0 --lora rank=4 int8".split(),
        *RUN_FLAGS.split(), "--data-path", str(tmp_path / "text.txt"),
        "--data-cache-path", str(tmp_path / "cache"), "--load", str(tmp_path / "base"), "--save", str(tmp_path / "run"),
    ]  # fmt: skip
    assert pretrain(flags) == 0
    sides = "--from", "megalite", "--to", "hf", "--load", tmp_path / "run", "--verify"
    status, out, error = convert(*sides, "--save", tmp_path / "merged")
    assert status == 0, error
    found = [float(part.split(",")[0]) for part in out.split("largest difference of logits ")[1:]]
    assert len(found) == 2 and max(found) < 1e-5


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("kind", ["bytes", "numbers"])
def test_megatron_gets_the_tokenizer_or_is_told_of_none(kind: str, form: str, convert: Convert, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else NullTokenizer(257)
    write_checkpoint(tmp_path / "run", tokenizer=tokenizer, model=tiny_model_config())
    flags = ["--ckpt-format", form, *(["--no-load-optim"] if form == "torch_dist" else [])]
    there = tmp_path / "there"
    status, out, error = convert(
        "--from", "megalite", "--to", "megatron", "--load", tmp_path / "run", "--save", there, *flags
    )
    assert status == 0, error
    if kind == "bytes":
        read = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(there))
        assert f"--tokenizer-model {there}" in out and read.encode("añ") == list("añ".encode())
    else:
        assert f"without a tokenizer ({tmp_path / 'run'} has NullTokenizer)" in out
        assert not list(there.glob("*token*"))


def check_a_base_that_has_moved(convert: Convert, tmp_path: Path, sides: Sequence[Any]) -> None:
    """--base is where the converter, its --verify, generation and evaluation look, and nowhere else; refused of what
    has none."""
    (tmp_path / "base").rename(tmp_path / "moved")
    status, _, error = convert(*sides, "--save", tmp_path / "b")
    assert status == 2 and "which is not there" in error and "--base to convert, generate and evaluate" in error
    there = ["--base", tmp_path / "moved"]
    assert convert(*sides, *there, "--save", tmp_path / "b")[0] == 0
    assert load_for_inference(tmp_path / "run", base=tmp_path / "moved", device="cpu").iteration > 0
    for other in (tmp_path / "moved", tmp_path / "back"):
        if other.name == "back":
            assert convert("--from", "hf", "--to", "megalite", "--load", tmp_path / "moved", "--save", other)[0] == 0
        with pytest.raises(ConfigError, match="needs no other; drop it|holds a whole model; drop it"):
            load_for_inference(other, base=tmp_path / "moved", device="cpu")
    (tmp_path / "moved").rename(tmp_path / "base")


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_a_disk_that_fills_up_is_one_line(
    target: str, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries hide the system's error: safetensors in an exception of its own, torch behind a wrong count."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def full_torch(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as the library does)

    write_checkpoint(tmp_path / "run", model=tiny_model_config(**LLAMA))
    monkeypatch.setattr(hf_files, "save_file", full)
    monkeypatch.setattr(torch, "save", full_torch)
    status, _, error = convert(
        "--from", "megalite", "--to", target, "--load", tmp_path / "run", "--save", tmp_path / "x"
    )
    assert status == 2 and error.count("\n") == 1
    assert f"--save={tmp_path / 'x'}" in error and "No space left on device" in error
    assert not list(tmp_path.glob("x*"))


def test_a_run_goes_on_from_a_converted_model(convert: Convert, tmp_path: Path, capsys: Any) -> None:
    write_checkpoint(tmp_path / "run", model=tiny_model_config(**LLAMA))
    convert("--from", "megalite", "--to", "hf", "--load", tmp_path / "run", "--save", tmp_path / "hf")
    convert("--from", "hf", "--to", "megalite", "--load", tmp_path / "hf", "--save", tmp_path / "start")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = [
        *MODEL_FLAGS.split(), *RUN_FLAGS.split(), "--norm-epsilon", "1e-5", "--init-method-std", "0.4",
        "--data-path", str(tmp_path / "text.txt"), "--data-cache-path", str(tmp_path / "cache"),
        "--load", str(tmp_path / "start"), "--save", str(tmp_path / "next"),
    ]  # fmt: skip
    capsys.readouterr()
    assert pretrain(flags) == 2
    assert "holds weights and no run (it was converted); add --finetune" in capsys.readouterr().err
    assert pretrain([*flags, "--finetune", "--lr", "1e-9"]) == 0
    before, after = (CheckpointReader(resolve_checkpoint(tmp_path / name)) for name in ("start", "next"))
    name = "layers.1.attention.qkv.weight"
    torch.testing.assert_close(after.read(name).double(), before.read(name).double(), rtol=0, atol=1e-6)


def test_a_hugging_face_model_is_not_taken_for_a_checkpoint(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, _, error = convert("--from", "megalite", "--to", "hf", "--load", tmp_path, "--save", tmp_path / "x")
    assert status == 2 and "tools/convert_checkpoint.py --from hf --to megalite" in error


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--from hf --to megalite --load nowhere --save x", "nowhere/config.json: cannot be read"),
        ("--from megalite --to hf --load nowhere --save x", "--load=nowhere: no such directory"),
        ("--from hf --to hf --load a --save b --verify", "--verify: compares hf with megalite"),
        ("--from hf --to megatron --load a --save b --verify", "--verify: compares hf with megalite"),
        ("--from hf --to megalite --load a --save b --trust-pickle", "--trust-pickle: only with --from megatron"),
        ("--from hf --to megalite --load a --save b --true-vocab-size 5", "--true-vocab-size=5: only with --from"),
        (
            "--from hf --to megalite --load a --save b --target-tensor-model-parallel-size 2",
            "--target-tensor-model-parallel-size=2: only with --to megatron; drop it",
        ),
        ("--from megatron --to hf --load nowhere --save b --trust-pickle", "--load=nowhere: no such directory"),
        ("--from hf --to megalite --load a --save b --ckpt-step 3", "--ckpt-step=3: a Hugging Face model has no steps"),
        ("--from gguf --to hf --load a --save b", "--from: invalid choice: 'gguf'"),
    ],
)
def test_errors_are_one_line(flags: str, line: str, convert: Convert) -> None:
    status, out, error = convert(*flags.split())
    assert status == 2 and line in error and error.count("\n") == 1 and not out


def test_of_a_module_of_the_users_own_the_way_out_is_named(convert: Convert, tmp_path: Path) -> None:
    module = ForeignModule(model_module="mine.py:make")
    config = config_around(dataclasses.replace(tiny_model_config(), module=module))
    weight = torch.arange(6.0).view(2, 3)
    shard = TensorShard("linear.weight", (2, 3), (0, 0), weight)
    meta = {"config": to_dict(config), "iteration": 1, "consumed_samples": 2}
    Checkpointer(tmp_path / "run", world=Axis.single("world")).save(1, [shard], meta, {})
    path = resolve_checkpoint(tmp_path / "run")
    for target in ("hf", "megatron", "dcp", "megalite"):
        status, out, error = convert(
            "--from", "megalite", "--to", target, "--load", path.parent, "--save", tmp_path / "x"
        )
        assert (status, out) == (2, ""), error
        assert error.startswith(f"error: {path}: holds a --model-module (mine.py:make), which its own code converts")
        way_out = error.strip().rpartition("give it its weights: ")[2]
        assert way_out == f"model.load_state_dict(megalite.read_weights('{path}'))"
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2, bias=False)})
    model.load_state_dict(megalite.read_weights(str(path)))
    assert torch.equal(model.state_dict()["linear.weight"], weight)
