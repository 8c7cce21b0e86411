"""Fine-tuning with adapters: any layout is plain torch in one process, the base stays as it is and costs weights alone.

`testing/adapters.py` says what an adapter is, in plain torch; `tests/unit/convert/test_adapters.py` asks `peft`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from equivalence.layouts import (
    TINY,
    Layout,
    assert_close,
    assert_same_tensors,
    compare,
    draw,
    saved_tensors,
    train,
    train_body,
)
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.convert import CheckpointSource, HuggingFaceSource, open_checkpoint, write_huggingface
from megalite.gradient import sink_of
from megalite.inference import load_for_inference
from megalite.inventory.layers import count_parameters, count_trained_parameters
from megalite.planner.model_states import state_bytes
from megalite.testing import run_ranks
from megalite.testing.adapters import in_eight_bits
from megalite.testing.oracle import reference
from megalite.train.run import open_run
from tests.held_bytes import held_bytes

LORA = "--lora rank=3 alpha=5"
GROUPED = "--model-type llama --num-query-groups 2"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CASES = {
    "tensor and pipeline parallel, split backward": (
        f"{GROUPED} --qk-layernorm",
        f"{TP} {PP} --sequence-parallel --pipeline-schedule zb-h1",
        4,
    ),
    "2bw": ("--optimizer muon --lora targets=c_attn c_proj", f"{PP} --pipeline-schedule 2bw --zero-stage 1", 2),
    "ZeRO stage 3": (
        "--swiglu --lora targets=linear_qkv linear_fc1_up linear_fc2",
        "--zero-stage 3 --recompute-granularity full --recompute-method uniform",
        2,
    ),
}


def layout(model: str, flags: str, world_size: int) -> Layout:
    where = ("--micro-batch-size", "1", *flags.split())
    return Layout(("--num-layers", "4", *LORA.split(), *model.split()), where, world_size, delay=int("2bw" in flags))


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.full) for n in [*CASES][1:])])
def test_a_layout_is_plain_torch(name: str) -> None:
    compare(layout(*CASES[name]))


OTHERS = {
    "bottleneck, tp and sequence parallel": (
        "--lora kind=bottleneck",
        f"{TP} {PP} --sequence-parallel --pipeline-schedule zb-h1",
        4,
    ),
    "prefix, tp and pp": ("--lora kind=prefix --max-position-embeddings 19", f"{TP} {PP}", 4),
    "bottleneck, halves and ZeRO 3": (
        "--lora kind=bottleneck",
        f"{TP} --sequence-parallel --zero-stage 3 --tp-comm-overlap --micro-batch-size 2",
        4,
    ),
    "bottleneck, tp, 8 bits and cp": ("--lora kind=bottleneck int8 --swiglu", f"{TP} --context-parallel-size 2", 4),
    "bottleneck, 2bw": ("--lora kind=bottleneck", f"{PP} --pipeline-schedule 2bw --zero-stage 1", 4),
    "bottleneck of experts": ("--lora kind=bottleneck --num-experts 4", "--expert-model-parallel-size 2", 2),
    "prefix, ZeRO 3": (
        f"{GROUPED} --qk-layernorm --lora kind=prefix",
        f"{TP} --sequence-parallel --zero-stage 3 --recompute-granularity full --recompute-method uniform",
        4,
    ),
}


@pytest.mark.parametrize("name", [*[*OTHERS][:3], *(pytest.param(n, marks=pytest.mark.full) for n in [*OTHERS][3:])])
def test_adapters_that_are_layers_are_plain_torch(name: str) -> None:
    model, flags, world_size = OTHERS[name]
    own = ("--num-layers", "4", "--lora", "rank=3", *model.split())
    compare(Layout(own, ("--micro-batch-size", "1", *flags.split()), world_size, delay=int("2bw" in flags)))


@pytest.mark.full
@pytest.mark.parametrize("number", range(24))
def test_random_layouts_with_adapters(number: int, fresh: int) -> None:
    rng = random.Random(f"{fresh} {number}")
    targets = rng.choice(["all-linear", "linear_qkv linear_fc1", "linear_q linear_v linear_fc2", "linear_proj"])
    shared = ["--lora-shared-a"] if number % 3 == 0 and targets != "linear_proj" else []
    sparse = ["--num-experts", "4"] if shared else []
    compare(draw(rng, more=[*LORA.split(), "--lora-targets", *targets.split(), *shared, *sparse]))


def frozen_body(world: World, argv: list[str]) -> dict[str, object]:
    """What a rank holds, and whether two steps have changed the bits of anything but adapters."""
    config = parse(argv, world_size=world.size)
    with open_run(config, world) as run:
        model = run.state.model
        modules = [module for stage in model.stages.values() for module in stage.modules]
        named = [pair for module in modules for pair in module.logical_parameters()]
        frozen = [p for name, p in named if ".adapters." not in name]
        before = [p.detach().clone() for p in frozen]
        for step in range(2):
            run.trainer.train_step(drain=step == 1)
        held = [held_bytes(family) for stage in model.buffers.values() for family in stage]
        return {
            "unchanged": all(map(torch.equal, frozen, before)),
            "gradients": sum(p.grad is not None or sink_of(p) is not None or p.requires_grad for p in frozen),
            "memory": {key: sum(each[key] for each in held) for key in held[0]} | model.optimizer.memory(),
            "masters": sum(here.stop - here.start for m in model.optimizer.masters for *_, here in m.pieces()),
            "memories": len({p.data_ptr() for p in frozen}) - len({name for name, _ in named if ".ad" not in name}),
            "trained": all(bool((p != 0).any()) for name, p in named if name.endswith("lora_b")),
        }


@pytest.mark.parametrize(
    ("flags", "world_size", "versions"),
    [
        ("--bf16", 1, 1),
        (f"{PP} --pipeline-schedule 2bw", 2, 2),
        pytest.param("--num-experts 4 --lora shared_a", 1, 1, marks=pytest.mark.landing),
    ],
)
def test_the_base_costs_its_weights_and_never_changes(flags: str, world_size: int, versions: int) -> None:
    """No gradient, no master, no moment, one copy of its weights for all versions; to the byte what is predicted."""
    argv = [*TINY, "--num-layers", "4", *LORA.split(), "--micro-batch-size", "1", *flags.split()]
    argv = [flag for flag in argv if flag != "--fp64" or "--bf16" not in argv]
    found = run_ranks(frozen_body, world_size, argv)
    config = parse(argv, world_size=world_size)
    model = config.model
    assert sum(rank["masters"] for rank in found) == count_trained_parameters(model) < count_parameters(model) / 3
    for rank, items in zip(found, [range(6)] if world_size == 1 else [range(3), range(3, 6)], strict=True):
        assert rank["unchanged"] and rank["trained"] and not rank["gradients"] and not rank["memories"], rank
        count = min(2, versions)
        expected = state_bytes(
            config, world_size, items, num_stages=world_size, versions=count, num_gradients=count, on_cpu=True
        )
        memory = rank["memory"]
        assert (memory["weights"], memory["gradients"]) == (expected.weights, expected.gradients)
        assert (memory["master"], memory["state"]) == (expected.master, expected.moments)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model, which a run of ours has trained a little."""
    folder = tmp_path_factory.mktemp("base")
    argv = [*TINY, "--num-layers", "4", "--micro-batch-size", "1", *GROUPED.split(), "--save", str(folder / "run")]
    run_ranks(train_body, 1, argv, 1)
    write_huggingface(CheckpointSource(folder / "run"), folder / "model")
    return folder / "model"


def fine_tune(
    base: Path, save: Path, steps: int, world_size: int = 1, flags: str = "", lora: str = LORA
) -> list[float]:
    """Losses."""
    more = f"--micro-batch-size 1 --use-checkpoint-args --seq-length 16 --load {base} --save {save} {lora} {flags}"
    return list(run_ranks(train_with_offer, world_size, [*TINY, *more.split()], steps)[0][0])


def train_with_offer(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None]]:
    """As `train_body`; the model is that of --load."""
    shape = "--num-layers 4 --max-position-embeddings 16".split() + GROUPED.split()
    return train_body(world, [flag for flag in argv if flag != "--use-checkpoint-args"] + shape, steps)


def test_a_run_is_stopped_and_goes_on_at_another_layout(base: Path, tmp_path: Path) -> None:
    """Adapters alone are saved; their base is read again, and they go on: bitwise at the same layout."""
    losses = fine_tune(base, tmp_path / "whole", 4)
    assert losses[0] == fine_tune(base, tmp_path / "plain", 1, lora="")[0], "adapters begin as nothing beside the base"
    whole = saved_tensors(tmp_path / "whole")
    assert {name.rpartition("/")[2] for name in whole} == {name for name in whole if "/" not in name}
    assert all(".adapters." in name for name in whole)
    for flags, world_size, exact in (("", 1, True), (f"{TP} {PP} --pipeline-schedule zb-h1", 4, False)):
        save = tmp_path / f"parts{world_size}"
        fine_tune(base, save, 2)
        fine_tune(base, save, 2, world_size, f"--auto-resume {flags}")
        for name, value in saved_tensors(save).items():
            assert torch.equal(value, whole[name]) if exact else (value - whole[name]).abs().max() < 1e-11, name


def test_a_run_beside_8_bits_goes_on_and_is_merged_as_it_was_trained(base: Path, tmp_path: Path) -> None:
    """Checkpoints hold adapters alone; merged weights and tools have the base as it was dequantised."""
    lora = f"{LORA} int8"
    fine_tune(base, tmp_path / "whole", 4, lora=lora)
    fine_tune(base, tmp_path / "run", 2, lora=lora)
    fine_tune(base, tmp_path / "run", 2, flags="--auto-resume", lora=lora)
    whole, stored = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "run")
    assert whole.keys() == stored.keys() and all(torch.equal(whole[name], stored[name]) for name in whole)
    plain, merged = HuggingFaceSource(base), open_checkpoint(tmp_path / "run")
    name = "layers.1.mlp.fc2"
    a, b = (stored[f"{name}.adapters.fc2.lora_{letter}"].double() for letter in "ab")
    expected = in_eight_bits(plain.read(f"{name}.weight").double()) + 5 / 3 * b @ a
    assert (merged.merged(f"{name}.weight").double() - expected).abs().max() < 1e-6
    assert torch.equal(merged.read("head.final_norm.weight"), plain.read("head.final_norm.weight"))
    layer = load_for_inference(tmp_path / "run", device="cpu").model.get_submodule("layers.1.mlp.fc2")
    assert layer.weight.dtype == torch.int8
    assert (
        layer.weight * layer.products.scale - in_eight_bits(plain.read(f"{name}.weight").double())
    ).abs().max() < 1e-6


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    """Not there, or with other bits: one line that says which and what to do. It may lie elsewhere."""
    moved = tmp_path / "moved"
    there = tmp_path / "there"
    there.mkdir()
    for file in base.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
    fine_tune(there, tmp_path / "run", 1)
    changed = tmp_path / "changed"
    shutil.copytree(there, changed)
    (changed / "config.json").write_text((changed / "config.json").read_text() + "\n")
    with pytest.raises(Exception, match=f"adapters of another model than {changed}"):  # and not the old one in silence
        fine_tune(changed, tmp_path / "run", 1, flags="--auto-resume")
    there.rename(moved)
    with pytest.raises(Exception, match=f"adapters of the model {there}, which is not there"):
        fine_tune(tmp_path / "run", tmp_path / "run", 1)
    fine_tune(moved, tmp_path / "run", 1, flags="--auto-resume")
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(Exception, match="adapters of another model than"):
        fine_tune(moved, tmp_path / "run", 1, flags="--auto-resume")


NAMED = ("--mock-data", "--tokenizer-type", "--vocab-size")


@pytest.mark.full
def test_loss_on_answers_is_the_same_at_every_layout(tmp_path: Path) -> None:
    """Conversations of unequal length, several in a sample."""
    write = pytest.importorskip("tests.unit.data.test_chat", reason="transformers is not installed")
    rng = random.Random(1)
    talks = [
        [{"role": role, "content": " small" * rng.randint(1, 9)} for role in ("user", "assistant") * rng.randint(1, 3)]
        for _ in range(40)
    ]
    _, prefix = write.write(tmp_path, [{"messages": talk} for talk in talks])
    model = "--model-type llama --num-layers 4 --reset-attention-mask --reset-position-ids"
    data = f"--data-path {prefix} --split 100,0,0 --tokenizer-type HuggingFaceTokenizer --calculate-per-token-loss"
    kept = [f for i, f in enumerate(TINY) if f not in NAMED and (i == 0 or TINY[i - 1] not in NAMED[1:])]
    argv = [*kept, *model.split(), *data.split(), "--tokenizer-model", str(tmp_path / "tokenizer")]
    argv += ["--micro-batch-size", "1"]
    expected = reference(tuple(argv), 3)
    for flags, world_size in (("", 1), (f"{TP} {PP} --sequence-parallel --pipeline-schedule zb-h1", 4)):
        found = train([*argv, *flags.split()], world_size, 3)
        assert_close(found.losses, expected.losses, 1e-12, "loss")
        assert_same_tensors(found.tensors, expected, 1e-11)


INT8 = {
    "tp and pp": ("--lora int8", f"{TP} {PP} --sequence-parallel --pipeline-schedule zb-h1", 4),
    "2bw and ZeRO 1": (
        f"{GROUPED} --lora int8 targets=q_proj,down_proj",
        f"{PP} --pipeline-schedule 2bw --zero-stage 1",
        4,
    ),
    "ZeRO 2": ("--lora int8", "--zero-stage 2", 2),
    "recomputed, cp": ("--swiglu --lora int8", "--context-parallel-size 2 --recompute-granularity full", 2),
}


@pytest.mark.parametrize("name", [next(iter(INT8)), *(pytest.param(n, marks=pytest.mark.full) for n in [*INT8][1:])])
def test_a_base_in_8_bits_is_plain_torch(name: str) -> None:
    compare(layout(*INT8[name]))


def eight_bit_body(world: World, argv: list[str], by_hand: bool) -> tuple[list[float], int]:
    """Losses of three steps, of a run or of one whose frozen matrices are made what 8 bits say; bytes of weights."""
    config = parse(argv, world_size=world.size)
    with open_run(config, world) as run:
        modules = [module for stage in run.state.model.stages.values() for module in stage.modules]
        named = {name: p for m in modules for name, p in m.logical_parameters() if not p.requires_grad}
        for name, p in named.items() if by_hand else ():
            if name.startswith("layers.") and p.dim() > 1:
                p.data.copy_(in_eight_bits(p.data.to(torch.promote_types(p.dtype, torch.float32))))
        losses = [float(run.trainer.train_step(drain=step == 2).lm_loss) for step in range(3)]
        layers = [part.products for m in modules for part in m.modules() if hasattr(part, "products")]
        scales = [products.scale for products in layers if hasattr(products, "scale")]
        held = {t.data_ptr(): t.nbytes for t in [*named.values(), *scales]}
        trained = sum(held_bytes(f)["weights"] for stage in run.state.model.buffers.values() for f in stage)
        return losses, trained + sum(held.values())


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [("--bf16", 1), pytest.param(f"{PP} --pipeline-schedule 2bw", 2, marks=pytest.mark.landing)],
)
def test_a_base_in_8_bits_is_bitwise_the_dequantised_one(flags: str, world_size: int) -> None:
    """And takes what the plan says, to the byte: codes and a scale for each row."""
    argv = [*TINY, "--num-layers", "4", *LORA.split(), "--micro-batch-size", "1", *flags.split()]
    argv = [flag for flag in argv if flag != "--fp64" or "--bf16" not in argv]
    plain = run_ranks(eight_bit_body, world_size, argv, True)
    config = parse(argv := [*argv, "--lora", "int8"], world_size=world_size)
    items = [range(6)] if world_size == 1 else [range(3), range(3, 6)]
    for rank, other, part in zip(run_ranks(eight_bit_body, world_size, argv, False), plain, items, strict=True):
        assert rank[0] == other[0]
        count = world_size
        expected = state_bytes(
            config, world_size, part, num_stages=world_size, versions=count, num_gradients=count, on_cpu=True
        )
        assert rank[1] == expected.weights


EP2 = "--expert-model-parallel-size 2"
SPARSE = "--num-experts 4 --moe-aux-loss-coeff 0.5 --swiglu --moe-ffn-hidden-size 24"
OF_EXPERTS = {
    "tp, ep and ZeRO 1": (f"{SPARSE} --lora shared_a", f"{TP} {EP2} --sequence-parallel --zero-stage 1", 4),
    "one expert a rank": (SPARSE, f"{TP} {EP2} --expert-tensor-parallel-size 1 --sequence-parallel", 2),
    "shared, one expert a rank": (
        f"{SPARSE} --lora shared_a",
        f"{TP} {EP2} --expert-tensor-parallel-size 1 --sequence-parallel",
        2,
    ),
    "pipeline, split backward": (
        f"{SPARSE} --model-type llama --moe-layer-freq 2 --moe-shared-expert-intermediate-size 16",
        f"{PP} {EP2} --pipeline-schedule zb-h1",
        4,
    ),
    "ZeRO 3": (f"{SPARSE} --lora shared_a targets=linear_fc2", f"{EP2} --zero-stage 3", 4),
    "2bw": (f"{SPARSE} --lora targets=linear_fc1", f"{PP} --pipeline-schedule 2bw --zero-stage 1", 2),
}


@pytest.mark.parametrize(
    "name", [next(iter(OF_EXPERTS)), *(pytest.param(n, marks=pytest.mark.full) for n in [*OF_EXPERTS][1:])]
)
def test_adapters_of_experts_are_plain_torch(name: str) -> None:
    compare(layout(*OF_EXPERTS[name]))
