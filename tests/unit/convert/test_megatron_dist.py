"""Megatron-LM's `torch_dist`: against transformers with torch's own writer, against megatron.core; hostile files."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import saved_tensors
from torch import Tensor

from megalite import strangers
from megalite.checkpoint import CheckpointReader
from megalite.comm import World
from megalite.config.cli import parse
from megalite.convert import (
    CheckpointSource,
    MegatronDistSource,
    open_megatron,
    state_of,
    write_checkpoint,
    write_huggingface,
)
from megalite.convert.dcp_files import DcpFiles
from megalite.convert.source import stored_shapes
from megalite.data.indexed import IndexedWriter
from megalite.errors import MegaliteError
from megalite.testing import run_ranks
from megalite.train.param_schedules import ParamSchedules, resolve_schedules
from megalite.train.run import open_run
from megalite.train.starting_point import offer_of, open_start
from tests.unit.convert.dcp_layout import random_cuts, stacked, write_dcp, write_torch_dist
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import S, V, assert_same, peer


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": ("gpt", {}, {}),
    "gpt-one-by-one": ("gpt", {}, dict(mixed=True)),
    "llama": ("llama", {}, dict(as_object=True)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True), dict(seed=3)),
}


@pytest.mark.parametrize("case", READ)
def test_from_torch_dist_to_hugging_face(case: str, tmp_path: Path) -> None:
    kind, changes, how = READ[case]
    model = peer(kind, **changes)
    write_torch_dist(tmp_path / "megatron", model, **how)
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager", dtype="auto").eval()
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    tokens = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_rectangles_are_put_together_as_torch_does(tmp_path: Path) -> None:
    """Every cut of a tensor, whole and at leading indices; and the plain values of an object."""
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "a": torch.randn(3, 4, 5, generator=generator), "b": torch.randn(7, 2, generator=generator).bfloat16(),
        "c": torch.tensor(2.5), "d": torch.arange(6.0), "o": {"x": [1, 2.5, None, "text"]},
    }  # fmt: skip
    write_dcp(tmp_path, state, random_cuts(state, 2))
    files = DcpFiles(tmp_path)
    for name in "abcd":
        assert torch.equal(files.read(name), state[name]), name
    assert torch.equal(files.read("a", (2,)), state["a"][2]) and torch.equal(files.read("a", (1, 3)), state["a"][1, 3])
    assert files.content("o") == state["o"]
    assert len(files.tensors["a"].chunks) > 1


def written_with_state(root: Path, **changes: Any) -> Path:
    """Masters and moments that are functions of the weights, number by number."""
    weights = stacked(peer("llama"))
    more = {f"optimizer.state.{kind}.{key}": of(t).float() for key, t in weights.items() for kind, of in STATE.items()}
    groups = [{"lr": 1e-3, "step": 97.0}]
    scheduler = dict(
        max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=64, num_steps=776, lr_decay_style="cosine", lr_decay_steps=8000,
        start_wd=0.01, end_wd=0.1, wd_incr_style="linear", wd_incr_steps=8000,
    )  # fmt: skip
    common = {"optimizer": {"optimizer": {"param_groups": groups}}, "opt_param_scheduler": scheduler}
    args = dict(
        seed=5, global_batch_size=8, micro_batch_size=2, consumed_train_samples=800, bf16=True, optimizer="adam"
    )
    return write_torch_dist(root, peer("llama"), more=more, common=common | changes.pop("common", {}), **args | changes)


STATE: dict[str, Callable[[Tensor], Tensor]] = {
    "param": lambda t: t + 1, "exp_avg": lambda t: -2 * t, "exp_avg_sq": lambda t: t * t,
}  # fmt: skip


def test_masters_and_moments_come_along(tmp_path: Path) -> None:
    written_with_state(tmp_path / "megatron")
    source = open_megatron(tmp_path / "megatron", true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    path = write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    found = saved_tensors(tmp_path / "ours")
    for name in stored_shapes(source.model):
        weights = source.read(name)
        assert torch.equal(found.pop(name), (weights + 1).float())
        assert torch.equal(found.pop(f"optimizer/exp_avg/{name}"), (-2 * weights).float())
        assert torch.equal(found.pop(f"optimizer/exp_avg_sq/{name}"), (weights * weights).float())
    assert not found
    reader = CheckpointReader(path)
    assert reader.read("optimizer/step").item() == 97 and reader.manifest.step == 100
    meta = reader.manifest.meta
    assert meta["progress"] == {
        "iteration": 100, "consumed_samples": 800, "updates": 100, "microbatches": 100, "skipped_iterations": 3,
        "schedule_samples": 776,
    }  # fmt: skip
    start = open_start(path, finetune=False)
    assert start.saved is not None and start.saved.training.precision.bf16
    theirs = ParamSchedules.from_meta(meta["opt_param_scheduler"], "x")
    assert theirs.learning_rate(64) == 1e-3 and theirs.learning_rate(8000) == 1e-4
    assert theirs.weight_decay(4000) == pytest.approx(0.055)
    flags = (
        f"--load {path} --use-checkpoint-args --mock-data --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 8 --start-weight-decay 0.01 "
        "--weight-decay 0.1 --end-weight-decay 0.1 --weight-decay-incr-style linear --train-iters 1000"
    )
    settled = resolve_schedules(
        parse(flags.split(), world_size=1, read_offer=offer_of), 1, start
    )  # the same, said in iterations
    assert settled.origin == "checkpoint" and settled.schedules.learning_rate == theirs.learning_rate


def test_state_that_is_not_taken_along(tmp_path: Path) -> None:
    def line(number: int, drop: str = "", **changes: Any) -> str:
        there = tmp_path / str(number)
        directory = written_with_state(there, **changes)
        change(
            directory,
            lambda m: [m.state_dict_metadata.pop(n) for n in list(m.state_dict_metadata) if drop and drop in n],
        )
        source = open_megatron(there, true_vocab_size=V)
        assert isinstance(source, MegatronDistSource)
        with pytest.raises(MegaliteError) as caught:
            write_checkpoint(source, there / "ours", run=state_of(source))
        return str(caught.value)

    assert "optimizer 'sgd' not supported" in line(1, optimizer="sgd")
    assert "exp_avg_sq of layers.0.input_norm.weight is missing" in line(2, "exp_avg_sq.decoder.layers.self_attention")
    assert "dp_reshardable); save it with --dist-ckpt-optim-fully-reshardable" in line(3, ".exp_avg.")
    assert "how many steps" in line(4, common={"optimizer": {}})


# Hostile files


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def planted(canary: Path) -> dict[str, Any]:
    """Objects that leave a file behind where they are unpickled."""
    touch, program = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    return {
        "posix.system": Calls(os.system, touch),
        "posix.popen": Calls(os.popen, touch),
        "subprocess.Popen": Calls(subprocess.Popen, ["touch", str(canary)]),
        "subprocess.check_output": Calls(subprocess.check_output, ["touch", str(canary)]),
        "builtins.exec": Calls(exec, program),
        "builtins.eval": Calls(eval, f"__import__('pathlib').Path({str(canary)!r}).touch()"),
        "builtins.open": Calls(open, str(canary), "w"),
        "io.open": Calls(io.open, str(canary), "w"),
        "pathlib.touch": Calls(Path.touch, canary),
        "builtins.getattr": Calls(getattr, canary, "touch"),
        "importlib.import_module": Calls(importlib.import_module, "antigravity"),
        "builtins.__import__": Calls(__import__, "antigravity"),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))),
        "torch.load": Calls(torch.load, str(canary)),
        "torch.save": Calls(torch.save, 1, str(canary)),
        "torch.hub": Calls(torch.hub.load, "nobody/nothing", "x"),
        "zipfile": Calls(zipfile.ZipFile, str(canary), "w"),
        "os.mkdir": Calls(os.mkdir, str(canary)),
        "shutil": Calls(__import__("shutil").copy, __file__, str(canary)),
        "runpy": Calls(__import__("runpy").run_path, __file__),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("torch_dist") / "whole"
    write_torch_dist(there, peer("gpt"))
    return there


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(whole, tmp_path / "there")) / "iter_0000100"


def refused(directory: Path) -> str:
    """The one line that a conversion ends with."""
    with pytest.raises(MegaliteError) as caught:
        write_checkpoint(open_megatron(directory), directory.parent.parent / "ours")
    assert "\n" not in str(caught.value)
    assert not list((directory.parent.parent / "ours").glob("*"))
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_metadata_that_carries_a_program(protocol: int, directory: Path) -> None:
    canary, path = directory.parent / "canary", directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name, evil in planted(canary).items():
        metadata.planner_data = {"x": [evil]}
        path.write_bytes(pickle.dumps(metadata, protocol=protocol))
        line = refused(directory)
        assert "asks for" in line and "nothing of it was executed" in line, (name, line)
        assert not canary.exists(), name


@pytest.mark.parametrize("place", ["common.pt", "item"])
def test_an_archive_that_carries_a_program(place: str, directory: Path) -> None:
    canary = directory.parent / "canary"
    for name, evil in planted(canary).items():
        if place == "common.pt":
            torch.save({"args": None, "x": evil}, directory / "common.pt")
        else:
            replace_item(directory, NAME, evil)
        line = refused(directory)
        assert "holds no args" not in line and not canary.exists(), (name, line)


def replace_item(directory: Path, name: str, value: Any) -> None:
    """Another object in the place of a tensor, at the end of its file."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    index, stored = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == name)
    torch.save(value, content := io.BytesIO())
    path = directory / stored.relative_path
    stored.offset, stored.length = path.stat().st_size, len(content.getvalue())
    path.write_bytes(path.read_bytes() + content.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_opcodes_and_names_that_no_metadata_has(directory: Path) -> None:
    path = directory / ".metadata"
    for raw, line in [
        (b"\x80\x02(cos\nsystem\nX\x01\0\0\0xo.", "asks for os.system"),
        (b"(ios\nsystem\n.", "INST"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x02X\x01\0\0\0xQ.", "BINPERSID"),
        (b"\x80\x02]}b.", "gives a state to what is no record"),
        (b"\x80\x02X\x01\0\0\0x)R.", "calls what is no class"),
        (b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.", "without storage_data"),
        (b"\x80\x02}.", "is not one of torch.distributed.checkpoint"),
        (b"", "not a whole"),
        (b"\x80\x02]", "not a whole"),
    ]:
        path.write_bytes(raw)
        assert line in refused(directory), raw


def change(directory: Path, apply: Callable[[Any], None]) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    apply(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


NAME = "decoder.final_layernorm.weight"


def _stored(metadata: Any, name: str = NAME) -> Any:
    return next(s for i, s in metadata.storage_data.items() if i.fqn == name)


def _entry(metadata: Any, name: str = NAME) -> Any:
    return metadata.state_dict_metadata[name]


def _set(target: Callable[[Any], Any], **fields: Any) -> Callable[[Any], None]:
    def apply(metadata: Any) -> None:
        for key, value in fields.items():
            object.__setattr__(target(metadata), key, value)

    return apply


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_set(_stored, relative_path="../../secret"), "is not allowed"),
        (_set(_stored, relative_path="/etc/passwd"), "is not allowed"),
        (_set(_stored, relative_path="__9_9.distcp"), "__9_9.distcp"),
        (_set(_stored, offset=10**12), "the file is not whole"),
        (_set(_stored, length=1), "claims to be larger than its 1 bytes"),
        (_set(_stored, offset=-1), "not what torch.distributed.checkpoint writes"),
        (_set(_stored, transform_descriptors=["zstd"]), "compressed or encrypted"),
        (_set(_entry, size=torch.Size([33])), "1 of 33 elements"),
        (_set(_entry, chunks=[]), "32 of 32 elements"),
        (_set(lambda m: _entry(m).chunks[0], sizes=torch.Size([2**40])), "is not inside"),
        (_set(lambda m: _entry(m).properties, dtype=torch.float32), "its .metadata says ['torch.float32', [32]]"),
        (_set(lambda m: _entry(m).properties, dtype=torch.int64), "dtype torch.int64"),
        (lambda m: m.state_dict_metadata.pop(NAME), "tensors are missing: head.final_norm.weight"),
        (lambda m: m.state_dict_metadata.update({"decoder.layers.odd": _entry(m)}), "not a whole"),
        (_set(lambda m: m, storage_data={}), "not a whole"),
        (_set(lambda m: m, state_dict_metadata=[1]), "not a whole"),
    ],
)
def test_a_metadata_that_is_wrong(damage: Callable[[Any], None], line: str, directory: Path) -> None:
    change(directory, damage)
    assert line in refused(directory)


def test_chunks_that_overlap_and_other_models(directory: Path) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    first = _entry(metadata, name).chunks[0]
    change(directory, lambda m: _entry(m, name).chunks.append(first))
    assert "overlap" in refused(directory)
    common = {"args": None}
    torch.save(common, directory / "common.pt")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "holds no args" in refused(directory)
    (directory / "common.pt").unlink()
    assert "holds no common.pt" in refused(directory)


def test_a_flipped_bit_of_an_item_is_found(directory: Path) -> None:
    source = open_megatron(directory)
    item = source.files.tensors["decoder.final_layernorm.weight"].chunks[0][1]  # type: ignore[union-attr]
    raw = bytearray(item.path.read_bytes())
    values = source.read("head.final_norm.weight")
    at = raw.index(values.numpy().tobytes())
    raw[at + 5] ^= 16
    item.path.write_bytes(raw)
    assert "the checksum of" in refused(directory)


def test_the_process_that_reads_it_is_another_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", subprocess.Popen)
    source = open_megatron(directory)
    assert source.files.unpickler.program.process.pid != os.getpid()  # type: ignore[union-attr]
    assert source.read("layers.3.mlp.fc2.weight").shape == (32, 128)


# megatron.core itself

CORE = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
needs_core = pytest.mark.skipif(not CORE, reason="megatron.core is not installed (megatron-core==0.16.1)")


def core(folder: Path, name: str, ranks: int = 1, **job: Any) -> dict[str, Any]:
    """Runs megatron.core; returns what a single process found."""
    program, text = str(Path(__file__).with_name("run_megatron_dist.py")), json.dumps({"name": name, **job})
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", program, str(folder), str(rank), text], stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    for process in started:
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error.decode()[-3000:]
    return torch.load(folder / f"{name}.pt") if ranks == 1 else {}


def logits_here(directory: Path, tokens: Tensor) -> Tensor:
    from megalite.inference import load_for_inference
    from megalite.microbatch import Microbatch

    loaded = load_for_inference(directory, device="cpu")
    rows, length = tokens.shape
    microbatch = Microbatch(
        tokens=tokens, labels=tokens, positions=torch.arange(length).expand(rows, length),
        loss_mask=torch.ones(rows, length), sample_ids=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip
    head: Any = loaded.model.get_submodule("head")
    with torch.no_grad():
        return head.logits(loaded.model.body(None, microbatch)).transpose(0, 1)


def train_on(world: World, argv: list[str]) -> None:
    """One iteration through the product; the state is saved."""
    with open_run(parse(argv, world_size=world.size, read_offer=offer_of), world) as run:
        run.trainer.train_step(drain=True)
        run.state.save(run.trainer.progress)


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_a_run_of_megatron_core_goes_on_here(kind: str, tmp_path: Path) -> None:
    """Its third step there, in one process, and here on four ranks: the same masters and moments."""
    told = core(tmp_path, "two", kind=kind, train=2, save="two")
    core(tmp_path, "three", kind=kind, load="two/iter_0000002", train=1, save="three")
    source, after = (open_megatron(tmp_path / name, true_vocab_size=100) for name in ("two", "three"))
    assert isinstance(source, MegatronDistSource) and isinstance(after, MegatronDistSource)
    run, expected = state_of(source), state_of(after)
    assert run is not None and expected is not None and (run.iteration, run.steps, expected.steps) == (2, 2, 3)
    for ours, theirs in {
        "layers.1.attention.qkv.weight": "decoder.layers.1.self_attention.linear_qkv.weight",
        "layers.0.mlp_norm.weight": "decoder.layers.0.pre_mlp_layernorm.weight",
        "head.final_norm.weight": "decoder.final_layernorm.weight",
    }.items():
        found, there = dict(run.read(ours)), told["state"][theirs]
        assert torch.equal(found[ours], there["param"]), ours
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"optimizer/{moment}/{ours}"], there[moment]), (ours, moment)
    write_checkpoint(source, tmp_path / "ours", run=run)

    with IndexedWriter(tmp_path / "text", vocab_size=128) as writer:
        writer.add_document(told["tokens"][0].tolist() * 40)
    argv = (
        f"--load {tmp_path / 'ours'} --use-checkpoint-args --save {tmp_path / 'next'} --data-path {tmp_path / 'text'} "
        "--split 100,0,0 --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-2 --clip-grad 0 "
        "--lr-decay-style constant --weight-decay 0 --eval-iters 0 --num-workers 0 --no-exit-signal-handler "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --adam-eps 1e-8"
    )
    run_ranks(train_on, 4, argv.split(), timeout=60)
    found = saved_tensors(tmp_path / "next")
    for name in stored_shapes(source.model):
        for key, values in expected.read(name):
            close = (found[key] - values).abs().max() <= 2e-5 * values.abs().max() + 1e-9
            assert close, (key, found[key] - values)


@pytest.mark.full
@needs_core
@pytest.mark.parametrize("kind", ["gpt", "llama", "experts", "mixed"])
def test_megatron_cores_own_files_are_read_at_any_layout(kind: str, tmp_path: Path) -> None:
    """One process trains and saves; its logits are ours. Two by two ranks load that and save it: the same tensors."""
    expected = core(tmp_path, "one", kind=kind, train=2, save="one")
    source = open_megatron(tmp_path / "one", true_vocab_size=100)
    write_checkpoint(source, tmp_path / "ours", dtype=torch.float32)
    found = logits_here(tmp_path / "ours", expected["tokens"])
    assert ((found - expected["logits"]).abs().max() / expected["logits"].abs().max()).item() < 5e-6
    tensors = {name: source.read(name) for name in stored_shapes(source.model)}
    for parallel in (False, True):
        name = f"four-{parallel}"
        core(tmp_path, name, 4, kind=kind, load="one/iter_0000002", save=name, tp=2, pp=2, parallel=parallel)
        again = open_megatron(tmp_path / name, true_vocab_size=100)
        assert_same({name: again.read(name) for name in tensors}, tensors)
