"""DeepSpeed's universal checkpoints: the documented layout by torch.save, DeepSpeed's own files, hostile ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import saved_tensors
from torch import Tensor

from megalite import strangers
from megalite.checkpoint import CheckpointReader, read_manifest
from megalite.comm import World
from megalite.convert import DcpSource, HuggingFaceSource, state_of, write_checkpoint
from megalite.errors import CheckpointError
from megalite.testing import run_ranks
from tests.unit.convert.continued import loaded_and_trained
from tests.unit.convert.family_cases import CASES, transformers
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_megatron import peer

COMMON = (
    "--use-checkpoint-args --mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 9 --eval-iters 0 --num-workers 0 --device cpu"
).split()
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda t: t.float(), "exp_avg": lambda t: -2 * t.float(), "exp_avg_sq": lambda t: t.float() ** 2
}  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


def universal(root: Path, model: Any, *, flat: bool = False, **states: Any) -> Path:
    """As `ds_to_universal.py` lays it out: dictionaries with `param`; from ZeRO stage 3 (flat) bare, flat tensors, no
    step.pt."""
    folder = root / "global_step5_universal"
    for name, values in model.state_dict().items():
        (folder / "zero" / name).mkdir(parents=True)
        for kind, of in KINDS.items():
            what = of(values).flatten() if flat else {"cat_dim": 0, "param": of(values)}
            torch.save(what, folder / "zero" / name / f"{kind}.pt")
        if not flat:
            torch.save(4, folder / "zero" / name / "step.pt")
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if flat else "mp_rank_00_model_states.pt"
    said = {"module": dict(model.state_dict()), "global_steps": 5, "global_samples": 40, "skipped_steps": 1}
    torch.save(said | states, folder / name)
    model.config.save_pretrained(folder)
    return folder


def check_tensors(found: dict[str, Tensor], model: Any, root: Path) -> None:
    """Masters and moments are the functions of the weights that `universal` wrote, by the family's own reader."""
    model.save_pretrained(root / "weights")
    source = HuggingFaceSource(root / "weights")
    names = [name for name in found if "/" not in name]
    assert len(found) == 3 * len(names) > 0
    for name in names:
        for kind, of in KINDS.items():
            there = found[name if kind == "fp32" else f"optimizer/{kind}/{name}"]
            assert torch.equal(there, of(source.read(name))), (kind, name)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", ["param", pytest.param("flat", marks=pytest.mark.landing)])
def test_a_run_of_deepspeed_continues_at_any_layout(form: str, tmp_path: Path) -> None:
    """In place at tp2 x pp2, and converted first: the same masters, moments, progress and next step."""
    model = peer("llama")
    folder = universal(tmp_path, model, flat=form == "flat")
    run_ranks(loaded_and_trained, 4, [*COMMON, *LAYOUT, "--load", str(folder), "--trust-pickle"], str(tmp_path / "a"))
    source = DcpSource(folder)
    path = write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    loaded_and_trained(World(), [*COMMON, "--load", str(path)], str(tmp_path / "b"))
    for name in ("a", "b"):
        check_tensors(saved_tensors(tmp_path / name / "iter_0000005"), model, tmp_path / name)
        progress = read_manifest(tmp_path / name / "iter_0000005").meta["progress"]
        assert [progress[key] for key in ("iteration", "consumed_samples", "skipped_iterations")] == [5, 40, 1]
        reader = CheckpointReader(tmp_path / name / "iter_0000006")
        assert reader.read("optimizer/step").item() == 5 and reader.manifest.meta["consumed_samples"] == 44
    one, other = (saved_tensors(tmp_path / name / "iter_0000006") for name in ("a", "b"))
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert (values - other[name]).abs().max() <= 1e-5 * values.abs().max(), name


@pytest.mark.usefixtures("here")
def test_moments_of_experts_and_sinks_come_along(tmp_path: Path) -> None:
    """gpt-oss: all experts of a layer in one tensor whose columns alternate, a sink a head."""
    kind, changes = CASES["gpt-oss"]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    source = DcpSource(universal(tmp_path, model))
    run = state_of(source)
    assert run is not None and any(name.endswith("softmax_offset") for name in run.names)
    assert sum(".experts." in name for name in run.names) == 3 * 4 * 2  # masters and two moments of four tensors
    check_tensors({name: run.stored(name) for name in run.names if name != "optimizer/step"}, model, tmp_path / "hf")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.usefixtures("here")
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of DeepSpeed's becomes a stand-in, any other name is refused."""
    monkeypatch.chdir(tmp_path)
    model = peer("llama")
    folder = universal(tmp_path, model)
    at = folder / "zero" / "model.norm.weight"
    source = DcpSource(folder)

    def line(name: str, content: Any) -> str:
        kept = (folder / name).read_bytes()
        torch.save(content, folder / name) if not isinstance(content, bytes) else (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(fresh := DcpSource(folder), tmp_path / "ours", run=state_of(fresh))
        (folder / name).write_bytes(kept)
        assert not (tmp_path / "executed").exists()
        return str(caught.value)

    name = "zero/model.norm.weight/"
    for kind in ("fp32.pt", "exp_avg.pt", "step.pt"):
        assert "asks for posix.system" in line(name + kind, {"param": Evil()})
    assert "asks for posix.system" in line("mp_rank_00_model_states.pt", {"global_steps": Evil()})
    assert "shape [3], config.json says" in line(name + "exp_avg_sq.pt", {"param": torch.ones(3)})
    assert "'4.5' is not a number of steps" in line(name + "step.pt", 4.5)
    assert "'None' is not a number of steps" in line("mp_rank_00_model_states.pt", {"global_steps": 5})
    assert "does not say how many steps" in line(name + "step.pt", 3)
    assert "4 steps of its optimizer in 2" in line("mp_rank_00_model_states.pt", dict(global_steps=2, global_samples=1))
    whole = (at / "fp32.pt").read_bytes()
    middle = whole.index(KINDS["fp32"](model.state_dict()["model.norm.weight"]).numpy().tobytes())
    assert "is damaged" in line(name + "fp32.pt", whole[:middle] + b"\xff" + whole[middle + 1 :])
    assert "not a whole file of torch.save" in line(name + "fp32.pt", whole[:100])
    (at / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer.state.model.norm.weight.exp_avg is missing; .*--finetune"):
        state_of(DcpSource(folder))
    assert torch.equal(source.read("head.final_norm.weight"), model.state_dict()["model.norm.weight"].float())


REAL = """
import os, sys, torch
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
import deepspeed
from transformers import LlamaForCausalLM
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
model = LlamaForCausalLM.from_pretrained(f"{sys.argv[1]}/hf", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
settings = dict(train_batch_size=1, bf16={"enabled": True}, zero_optimization={"stage": int(sys.argv[2])},
                zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
for _ in range(3):
    engine.backward(engine(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss)
    engine.step()
engine.save_checkpoint(f"{sys.argv[1]}/run", tag="global_step3")
from deepspeed.checkpoint.ds_to_universal import main
from argparse import Namespace
main(Namespace(input_folder=f"{sys.argv[1]}/run/global_step3", output_folder=f"{sys.argv[1]}/run/universal",
     num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (0.19.8)")
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_files_are_read(stage: int, tmp_path: Path) -> None:
    """Trained, saved and made universal by DeepSpeed itself; the moments are those that torch.load finds there."""
    model = peer("llama").float()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "real.py").write_text(REAL)
    told = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, tmp_path / "real.py", tmp_path, str(stage)], env=told, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    folder = tmp_path / "run" / "universal"
    source = DcpSource(folder, tmp_path / "hf" / "config.json")
    run = state_of(source)
    assert run is not None and (run.iteration, run.steps, run.samples) == (3, 3, 3)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for ours, theirs in (("head.final_norm.weight", "model.norm.weight"), ("head.output.weight", "lm_head.weight")):
        for kind in KINDS:
            there = torch.load(folder / "zero" / theirs / f"{kind}.pt", weights_only=False)
            there = (there if isinstance(there, Tensor) else there["param"]).reshape(-1, config["hidden_size"])
            found = run.stored(ours if kind == "fp32" else f"optimizer/{kind}/{ours}")
            assert torch.equal(found.reshape(there.shape), there) and there.abs().max() > 0, (kind, ours)
    write_checkpoint(source, tmp_path / "ours", run=run)
