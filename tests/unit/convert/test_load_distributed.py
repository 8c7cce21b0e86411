"""Runs of other programs, continued in place: `--load DIR --trust-pickle`, at any layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equivalence.layouts import saved_tensors
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import pretrain_gpt
from megalite import strangers
from megalite.checkpoint import CheckpointReader, read_manifest
from megalite.checkpoint.start_decision import decide_start
from megalite.comm import World
from megalite.config.cli import parse
from megalite.convert import HuggingFaceSource, MegatronDistSource, open_megatron, state_of, write_checkpoint
from megalite.convert.source import stored_shapes
from megalite.errors import CheckpointError
from megalite.testing import run_ranks
from megalite.train.matmul_precision import MatmulChoice
from megalite.train.param_schedules import resolve_schedules
from megalite.train.resume_report import changes, resume_report
from megalite.train.starting_point import offer_of, open_start
from tests.unit.convert.continued import loaded_and_trained
from tests.unit.convert.dcp_layout import titan_name
from tests.unit.convert.megatron_layout import HereInstead
from tests.unit.convert.test_dcp import turned
from tests.unit.convert.test_megatron import V, peer
from tests.unit.convert.test_megatron_dist import written_with_state


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "Popen", HereInstead)


def test_a_run_continues_from_where_it_lies(tmp_path: Path) -> None:
    """At another layout: the masters and moments that the files hold, and the step of a run converted first."""
    root = written_with_state(tmp_path / "megatron").parent
    source = open_megatron(root, true_vocab_size=V)
    assert isinstance(source, MegatronDistSource)
    write_checkpoint(source, tmp_path / "ours", run=state_of(source))
    common = (
        f"--use-checkpoint-args --vocab-size {V} --mock-data --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--lr 1e-3 --train-iters 1000 --use-checkpoint-opt-param-scheduler --eval-iters 0 --num-workers 0 --device cpu"
    ).split()
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    run_ranks(loaded_and_trained, 4, [*common, *layout, "--load", str(root), "--trust-pickle"], str(tmp_path / "next"))
    loaded_and_trained(World(), [*common, "--load", str(tmp_path / "ours")], str(tmp_path / "other"))
    found = saved_tensors(tmp_path / "next" / "iter_0000100")
    for name in stored_shapes(source.model):
        weights = source.read(name)
        assert torch.equal(found.pop(name), (weights + 1).float()), name
        assert torch.equal(found.pop(f"optimizer/exp_avg/{name}"), (-2 * weights).float())
        assert torch.equal(found.pop(f"optimizer/exp_avg_sq/{name}"), (weights * weights).float())
    assert not found
    steps = [CheckpointReader(tmp_path / "next" / f"iter_0000{step}").read("optimizer/step") for step in (100, 101)]
    assert [step.item() for step in steps] == [97, 98]
    there, here = (saved_tensors(tmp_path / name / "iter_0000101") for name in ("next", "other"))
    assert there.keys() == here.keys()
    for name, values in there.items():
        assert (values - here[name]).abs().max() <= 1e-2 * here[name].abs().max() + 1e-9, name  # sums in bf16


def test_what_the_format_does_not_hold_has_not_changed(tmp_path: Path) -> None:
    """Data, device, layout, warm-up and validation are in no torch_dist; what its args say is compared."""
    root = written_with_state(tmp_path / "megatron", hidden_dropout=0.1, clip_grad=2.0).parent
    same = (
        f"--use-checkpoint-args --load {root} --trust-pickle --vocab-size {V} --mock-data --bf16 --lr 1e-3 "
        "--min-lr 1e-4 --micro-batch-size 2 --global-batch-size 8 --seed 5 --train-iters 1000 "
        "--lr-warmup iters=8 --device cpu --num-workers 0 --eval-iters 0 --split 1,0,0 "
        "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 2 "
        "--weight-decay-ramp start=0.01 end=0.1 style=linear --hidden-dropout 0.1 --tensor-model-parallel-size 2"
    ).split()
    start = open_start(root, parse(same, world_size=2, read_offer=offer_of), 2)
    assert start.saved is not None and start.told is not None
    for words, expected in (
        ("", {}),
        ("--hidden-dropout 0", {"--hidden-dropout": ("0.1", "0")}),
        ("--clip-grad 1 --global-batch-size 16", {"--clip-grad": ("2", "1"), "--global-batch-size": ("8", "16")}),
        ("--weight-decay 0.2 --lr-warmup iters=4", {"--weight-decay": ("0.1", "0.2")}),
        ("--attention-dropout 0.3", {}),  # not in its args
        ("--micro-batch-size 1 --split 9,1,0 --optimizer-args adam_eps=1e-6", {"--micro-batch-size": ("2", "1")}),
    ):
        config = parse([*same, *words.split()], world_size=2, read_offer=offer_of)
        assert changes(start.saved, 1, config, 2, told=start.told) == expected, words
    assert len(changes(start.saved, 1, config, 2)) > 5, "of a checkpoint of ours all is known"


def test_schedules_that_the_flags_override_have_changed(tmp_path: Path) -> None:
    """Its scheduler's state says 8,000 samples of decay after 64 of warm-up: 1,000 and 8 iterations of 8."""
    root = written_with_state(tmp_path / "megatron").parent
    same = (
        f"--use-checkpoint-args --load {root} --trust-pickle --vocab-size {V} --mock-data --bf16 --lr 1e-3 "
        "--min-lr 1e-4 --micro-batch-size 2 --global-batch-size 8 --seed 5 --train-iters 1000 --lr-warmup iters=8 "
        "--lr-decay-style cosine --weight-decay 0.1 --weight-decay-ramp start=0.01 end=0.1 style=linear --device cpu "
        "--override-opt-param-scheduler"
    ).split()
    start = open_start(root, parse(same, world_size=1, read_offer=offer_of), 1)
    for words, expected in (
        ("", "nothing"),
        ("--lr-decay-iters 1500", "--lr-decay-iters 8,000 samples -> 12,000 samples"),
        ("--lr-warmup iters=4", "--lr-warmup-iters 64 samples -> 32 samples"),
        ("--lr-decay-iters 1500 --lr 2e-3", "--lr-decay-iters 8,000 samples -> 12,000 samples; --lr 0.001 -> 0.002"),
    ):
        config = parse([*same, *words.split()], world_size=1, read_offer=offer_of)
        settled = resolve_schedules(config, 1, start)
        rows, _ = resume_report(start, settled, 1, [], MatmulChoice("highest", "cpu"), [])
        changed = dict(rows)["changed"].split("; ")
        assert sorted(changed) == sorted(expected.split("; ")), words


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "(Megatron-LM's torch_dist? Training takes it with --trust-pickle, and "),
        ("--trust-pickle --lora rank=2", "adapters need a model whose content they can record"),
        ("--trust-pickle --ckpt-step 7", "iter_0000007 is not there"),
        ("--trust-pickle --save {root}", "is the distributed checkpoint of --load; choose a new directory"),
        ("--trust-pickle --num-layers 3", "--num-layers=3"),
    ],
)
def test_a_run_that_does_not_continue(flags: str, line: str, tmp_path: Path, capfd: Any) -> None:
    """Each is one line, found by --dry-run too."""
    root = written_with_state(tmp_path / "megatron").parent
    common = "--use-checkpoint-args --mock-data --micro-batch-size 1 --bf16 --lr 1e-3 --train-iters 1000 --device cpu"
    argv = [*common.split(), "--load", str(root), *flags.format(root=root).split()]
    for more in ([], ["--dry-run"]):
        capfd.readouterr()
        assert pretrain_gpt.main([*argv, *more]) == 2
        (text,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert line in text


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("flags", ["", "--trust-pickle", "--use-checkpoint-args", "--trust-pickle --dry-run"])
def test_an_interrupted_save_of_megatrons_is_named(flags: str, older: bool, tmp_path: Path, capfd: Any) -> None:
    """Its .metadata is written last. Whatever is said to be read, the cause is one, and the converter's, too."""
    torn = tmp_path / "iter_0000004"
    torn.mkdir()
    (torn / "__0_0.distcp").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    if older:
        (tmp_path / "iter_0000002").mkdir()
        (tmp_path / "iter_0000002" / ".metadata").touch()
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --micro-batch-size 1 --lr 1e-3"
    argv = [*model.split(), "--train-iters", "1", "--mock-data", "--device", "cpu", *flags.split()]
    cause = "iter_0000004 holds .distcp files but no .metadata, which is written last: that save is not whole; take an "
    trusts = "--trust-pickle" in flags
    for load in (tmp_path, torn):
        assert pretrain_gpt.main([*argv, "--load", str(load)]) == 2
        (text,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        good = older and not trusts and load != torn  # what is whole is offered
        assert (cause in text, "with --trust-pickle" in text) == (not good, good), text
        with pytest.raises(CheckpointError, match=re.escape(cause)):
            open_megatron(load)
        if trusts and not older:
            with pytest.raises(CheckpointError, match=re.escape(cause)):
                decide_start(save=None, load=str(load), trust_pickle=True)


def test_a_checkpoint_of_ours_is_no_pickle(tmp_path: Path) -> None:
    source = open_megatron(written_with_state(tmp_path / "megatron").parent)
    write_checkpoint(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is not in torch's distributed format; drop it"):
        decide_start(save=None, load=str(tmp_path / "ours"), trust_pickle=True)


@pytest.mark.parametrize("form", ["titan", pytest.param("hf", marks=pytest.mark.landing)])
def test_a_run_of_torch_continues_with_its_moments(form: str, tmp_path: Path) -> None:
    """torch's own AdamW, saved by torch's own functions as torchtitan does; read at tp2 x pp2."""
    model = peer("llama").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
        optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    kinds = {f"optimizer.{name}": value for name, value in state.items()}
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    names = {name: titan_name(name) if form == "titan" else name for name in weights}
    written = {names[name]: rows(form, name, value) for name, value in weights.items()}
    for key, value in kinds.items():
        head, name, kind = re.fullmatch(r"(optimizer\.\w+\.)(.+)\.(\w+)", key).groups()  # type: ignore[union-attr]
        if name in names:
            written[f"{head}{names[name]}.{kind}"] = rows(form, name, value) if "exp_avg" in kind else value
    root = tmp_path / "step-3"
    dcp.save(written | {"train_state": {"step": torch.tensor(3)}}, checkpoint_id=root, no_dist=True)
    model.config.save_pretrained(root)
    common = (
        "--use-checkpoint-args --mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
        "--train-iters 9 --eval-iters 0 --num-workers 0 --device cpu --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2"
    ).split()
    argv = [*common, "--load", str(root), "--trust-pickle"]
    run_ranks(loaded_and_trained, 4, argv, str(tmp_path / "next"), apart=form == "hf")
    found = saved_tensors(tmp_path / "next" / "iter_0000003")
    assert read_manifest(tmp_path / "next" / "iter_0000003").meta["progress"]["consumed_samples"] == 12
    model.save_pretrained(tmp_path / "weights")
    expected = {name: HuggingFaceSource(tmp_path / "weights").read(name) for name in found if "/" not in name}
    for kind in ("exp_avg", "exp_avg_sq"):
        for parameter in model.parameters():
            parameter.data = optimizer.state[parameter][kind]
        model.save_pretrained(tmp_path / kind)
        source = HuggingFaceSource(tmp_path / kind)
        expected |= {f"optimizer/{kind}/{name}": source.read(name) for name in list(expected) if "/" not in name}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    steps = [CheckpointReader(tmp_path / "next" / f"iter_000000{n}").read("optimizer/step").item() for n in (3, 4)]
    assert steps == [3, 4]


def rows(form: str, name: str, values: Any) -> Any:
    """As torchtitan has the rows of queries and keys."""
    return turned(values) if form == "titan" and name.endswith(("q_proj.weight", "k_proj.weight")) else values
