"""No flag is accepted and ignored: each changes what a run computes, writes or says, or another test shows its effect.
A row runs a tiny training twice, with and without the flag, and compares everything that the run left behind but times.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.comm import mesh_channel
from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config import parse
from megalite.config.root import all_options
from megalite.errors import MegaliteError
from megalite.inventory.pipeline import stage_layer_ranges
from megalite.train.matmul_precision import set_matmul_precision
from megalite.train.programs import ProgramCache
from megalite.train.run import run_training
from pretrain_gpt import main

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 4 --mock-data --vocab-size 64 --eval-iters 0 "
    "--log-interval 1 --device cpu --num-workers 0"
)
TEXT = "--no-mock-data --vocab-size 0 --data-path TEXT --data-cache-path CACHE --split 80,20,0"
BYTES = "--tokenizer-type ByteTokenizer --vocab-size 0"
UNTIED, OFFLOADED = "--untie-embeddings-and-output-weights", "--embedding-offload cpu"
YARN = "--position-embedding-type rope --rotary-base 20 --rope-scaling type=yarn original_length=96"
EXPERTS = "--num-experts 4"
TIMES = re.compile(
    "eta_s|hours|time|second|tflops|memory|mfu|host|pid|started|goodput|path|save|trace|wall|date|fraction|straggler"
)  # noqa: E501

# (flags that both runs share, the flags in question)
KFAC = ("momentum 0", "decay 0", "damping 1", "kl-clip 1e-9", "scale 0.5", "inverse-frequency 1")
PRECONDITIONED = ("beta1 0.5", "beta2 0.5", "eps 0.1", "precondition-frequency 1", "max-precond-dim 1")
ROWS = [
    ("--pipeline-schedule 2bw --staleness-correction none", "--staleness-correction predict"),
    ("--pipeline-schedule 2bw --staleness-correction predict", "--staleness-lookahead 3"),
    ("--ffn-hidden-size 64", "--model-type llama"),
    ("", "--delayed-parameter-update"),
    (UNTIED, f"{OFFLOADED} --embedding-cache-rows 64"),
    (f"{UNTIED} {OFFLOADED} --embedding-cache-rows 64", "--embedding-cache-rows 32"),
    (f"{UNTIED} {OFFLOADED}", "--embedding-lookahead 0"),
    ("", "--num-layers 3"),
    ("", "--hidden-size 32"),
    ("", "--ffn-hidden-size 32"),
    ("", "--num-attention-heads 2"),
    ("", "--num-query-groups 2"),
    ("", "--kv-channels 8"),
    ("", "--seq-length 8"),
    ("", "--position-embedding-type none"),
    ("--position-embedding-type rope", "--rotary-base 100"),
    ("--position-embedding-type rope", "--rotary-percent 0.5"),
    ("--position-embedding-type rope", "--rotary-seq-len-interpolation-factor 2"),
    ("--position-embedding-type rope --kv-channels 16", "--use-rope-scaling"),
    ("--position-embedding-type rope --kv-channels 16 --use-rope-scaling", "--rope-scaling-factor 32"),
    ("--position-embedding-type rope --kv-channels 16 --use-rope-scaling", "--rope-scaling-original-length 16"),
    ("--position-embedding-type rope --kv-channels 16 --use-rope-scaling", "--rope-scaling-type yarn"),
    ("", "--window-size 4"),
    ("--window-size 4", "--window-attn-skip-freq 2"),
    ("--position-embedding-type rope", "--no-rope-freq 1,0"),
    ("", "--softmax-type learnable"),
    ("--softmax-type learnable", "--softmax-type off-by-one"),
    ("--softmax-type off-by-one", "--softmax-type-skip-freq 2"),
    ("--final-logit-softcapping 0.1", "--softcapping attention=0.1"),
    ("--softcapping attention=0.1 final=0.1", "--attn-logit-softcapping-skip-freq 2"),
    ("", "--use-parallel-residual"),
    ("", "--normalization RMSNorm"),
    ("", "--norm-epsilon 0.1"),
    ("", "--activation gelu-tanh"),
    ("", "--disable-bias-linear"),
    ("--disable-bias-linear", "--add-qkv-bias"),
    ("", "--qk-layernorm"),
    ("--normalization RMSNorm --qk-layernorm", "--qk-layernorm-across-heads"),
    ("", "--norm-placement post"),
    ("", "--apply-layernorm-1p"),
    (YARN, "--yarn-beta-fast 1.5"),
    (YARN, "--yarn-beta-slow 0.01"),
    (YARN, "--no-yarn-correction-range-round-to-int"),
    (f"{YARN} mscale=1 mscale_all_dim=1", "--rope-scaling mscale=2"),
    (f"{YARN} mscale=1 mscale_all_dim=1", "--rope-scaling mscale_all_dim=2"),
    ("", "--softmax-scale 0.1"),
    ("", "--embedding-multiplier 4"),
    ("--position-embedding-type rope --window-size 5 --window-attn-skip-freq 2", "--window-rotary-base 100"),
    ("--norm-placement post", "--norm-placement sandwich"),
    ("", "--untie-embeddings-and-output-weights"),
    ("", "--hidden-dropout 0.5"),
    ("", "--attention-dropout 0.5"),
    ("", "--init-method-std 0.1"),
    ("", "--z-loss-coeff 0.5"),
    ("", "--vocab-size 60"),
    ("--bf16", "--fp32-residual-connection"),
    ("--bf16", "--grad-reduce-in-bf16"),
    ("", "--bf16"),
    ("", "--fp16"),
    ("", "--fp64"),
    ("--bf16", "--fp8-format e4m3"),
    ("--fp8-format e4m3", "--fp8-format hybrid"),
    ("--fp8-format e4m3", "--fp8-recipe rowwise"),
    ("--fp8-format e4m3 --fp8-recipe delayed", "--fp8-amax-history-len 1"),
    ("", "--micro-batch-size 4"),
    ("", "--global-batch-size 8"),
    ("--global-batch-size 8", "--rampup-batch-size 4 4 8"),
    ("--global-batch-size 8", "--train-iters 3"),
    ("", "--seed 5"),
    ("--fp16", "--loss-scale 64"),
    ("--fp16", "--initial-loss-scale 1024"),
    ("--fp16 --initial-loss-scale 1024", "--loss-scale-window 1"),
    ("--fp16", "--min-loss-scale 4294967296"),
    ("--fp16", "--hysteresis 1"),
    ("--eod-mask-loss", "--calculate-per-token-loss"),
    ("--eval-iters 2", "--eval-interval 2"),
    ("", "--eval-iters 1"),
    (TEXT, "--tokenizer-type CharTokenizer"),
    (f"{TEXT} --eval-iters 1", "--full-validation"),
    ("", "--exit-interval 2"),
    ("", "--iterations-to-skip 2"),
    ("--eval-iters 1", "--skip-train"),
    ("", "--optimizer sgd"),
    ("", "--lr 1e-3"),
    ("", "--min-lr 5e-3"),
    ("", "--lr-decay-style cosine"),
    ("", "--lr-decay-iters 2"),
    ("", "--lr-decay-samples 8"),
    ("", "--lr-warmup-iters 2"),
    ("", "--lr-warmup-samples 8"),
    ("", "--lr-warmup-fraction 0.5"),
    ("--lr-warmup-iters 2", "--lr-warmup-init 5e-3"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-wsd-decay-iters 3"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 3", "--lr-wsd-decay-style linear"),
    ("", "--weight-decay 0.5"),
    ("", "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.9"),
    ("", "--adam-beta1 0.5"),
    ("", "--adam-beta2 0.5"),
    ("", "--adam-eps 1e-2"),
    ("--optimizer sgd", "--sgd-momentum 0"),
    ("--optimizer lion", "--lion-beta1 0.1"),
    ("--optimizer lion", "--optimizer-args lion_beta1=0.1"),
    ("--fp16", "--max-skipped-updates 1 --initial-loss-scale 3e38 --min-loss-scale 3e38"),
    ("--optimizer lion", "--lion-beta2 0.1"),
    ("--optimizer muon", "--muon-momentum 0.5"),
    ("--optimizer muon", "--muon-scale-mode shape_scaling"),
    ("--optimizer muon", "--muon-extra-scale-factor 0.5"),
    *(("", f"--optimizer {rule}") for rule in ("soap", "shampoo", "kfac", "adafactor")),
    *((f"--optimizer {rule}", f"--{rule}-{value}") for rule in ("soap", "shampoo") for value in PRECONDITIONED),
    ("--optimizer shampoo", "--shampoo-matrix-eps 0.1"),
    *(("--optimizer kfac", f"--kfac-{value}") for value in KFAC),
    ("--optimizer adafactor", "--adafactor-scale-parameter"),
    ("", "--exp-avg-dtype bf16"),
    ("", "--exp-avg-sq-dtype bf16"),
    ("", "--clip-grad 0.01"),
    ("", "--lora-rank 2"),
    *(("--lora-rank 2", f"--lora {w}") for w in "alpha=9 targets=linear_qkv kind=bottleneck".split()),
    ("--lora-rank 2", "--frozen-weights-int8"),
    (f"{EXPERTS} --lora-rank 2", "--lora-shared-a"),
    ("", "--num-experts 4"),
    (EXPERTS, "--moe-router-topk 3"),
    (EXPERTS, "--moe-ffn-hidden-size 32"),
    (EXPERTS, "--moe-layer-freq 2"),
    (EXPERTS, "--moe-shared-expert-intermediate-size 16"),
    (f"{EXPERTS} --moe-aux-loss-coeff 0.5", "--moe-router-load-balancing-type seq_aux_loss"),
    (EXPERTS, "--moe-aux-loss-coeff 0.5"),
    (EXPERTS, "--moe-z-loss-coeff 0.5"),
    (EXPERTS, "--moe-expert-capacity-factor 0.5"),
    (EXPERTS, "--moe-router-score-function sigmoid"),
    (EXPERTS, "--moe-router-pre-softmax"),
    (f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 2", "--moe-router-group-topk 1"),
    (f"{EXPERTS} --moe-router-group-topk 1 --moe-router-num-groups 1", "--moe-router-num-groups 2"),
    (EXPERTS, "--moe-router-topk-scaling-factor 2"),
    (f"{EXPERTS} --moe-router-score-function sigmoid", "--moe-router-enable-expert-bias"),
    (
        f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate 0.1",
    ),
    ("--split 50,50,0", "--split 90,10,0"),
    ("", "--reset-position-ids"),
    ("", "--reset-attention-mask"),
    ("", "--eod-mask-loss"),
    ("", "--save-interval 2"),
    ("--save-interval 1", "--keep-last-n 1"),
    ("--save-interval 1", "--save-retain-interval 2"),
    ("", "--log-interval 2"),
    ("", "--trace-pipeline RUN/pipeline.txt"),
    (BYTES, "--sample-interval 4 --sample-prompts TEXT --sample-tokens 1"),
    (f"{BYTES} --sample-interval 4 --sample-prompts TEXT --sample-tokens 1", "--sample-tokens 2"),
    ("", "--async-save --save-interval 1 --keep-last-n 1"),
    ("", "--profile --profile-step-start 1 --profile-step-end 2"),
]
# Flags that change nothing here (one rank, no optional package), and the test that shows what they do by its own words.
ELSEWHERE = {
    "--attention-softmax-in-fp32": ("unit/nn/test_layers.py", "softmax_in_fp32"),
    "--num-distributed-optimizer-instances": ("distributed/parallel/zero/test_zero_equality.py", "dp_replicate"),
    "--fp8-param-gather": ("equivalence/test_float8_gather.py", "bytes_are_fewer"),
    "--latent-norm-epsilon": ("unit/convert/test_families.py", "deepseek"),
    "--mtp-loss-scaling-factor": ("equivalence/test_further_tokens.py", "loss_scaling_factor=0.7"),
    "--async-save": ("faults/test_checkpoint_faults.py", "background"),
}
# Flags that take up a run of 4 iterations at DIR.
LOADS = [
    ("--load DIR --train-iters 6 OVERRIDE", "--load DIR --train-iters 6 --no-load-optim"),
    ("--load DIR --train-iters 6 OVERRIDE", "--load DIR --train-iters 6 --finetune"),
    ("--load DIR --train-iters 6 OVERRIDE --seed 7", "--load DIR --train-iters 6 OVERRIDE --seed 7 --no-load-rng"),
    ("--load DIR --train-iters 6 OVERRIDE", "--load DIR --train-iters 6 OVERRIDE --ckpt-step 2"),
    ("--load DIR --train-iters 6 OVERRIDE", "--load DIR --train-iters 6 --use-checkpoint-opt-param-scheduler"),
    ("--save DIR --train-iters 6 --auto-resume OVERRIDE", "--train-iters 6"),
]
# Two spellings that cannot stand together, or that end a run.
PAIRS = [
    ("--lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-decay-style WSD --lr-wsd-decay-samples 12"),
    ("--lr 1e30 --clip-grad 0 --nonfinite stop", "--lr 1e30 --clip-grad 0 --nonfinite skip"),
    (
        f"{TEXT} --eval-iters 1",
        "--no-mock-data --vocab-size 0 --data-cache-path CACHE --train-data-path TEXT --eval-iters 1",
    ),
    (
        "--no-mock-data --vocab-size 0 --data-cache-path CACHE --train-data-path TEXT --eval-iters 1",
        "--no-mock-data --vocab-size 0 --data-cache-path CACHE --train-data-path TEXT --valid-data-path TEXT "
        "--test-data-path TEXT --eval-iters 1",
    ),
]
# Flags whose row needs another length flag, or none.
WITHOUT = dict.fromkeys(("--train-samples 12", "--train-tokens 200"), "--train-iters 4")
WITHOUT |= {"--step-batch-size-schedule 0:4": "--global-batch-size 4"}


def observe(flags: str, folder: Path, without: str = "") -> dict[str, Any]:
    """What a run leaves behind: its metrics without times, the names of its files, the error that ended it."""
    (text := folder.parent / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(200)))
    flags = (
        flags.replace("RUN", str(folder / "run"))
        .replace("TEXT", str(text))
        .replace("CACHE", str(folder.parent / "cache"))
        .replace("OVERRIDE", "--override-opt-param-scheduler")
    )
    config = parse([*BASE.replace(without, "", 1).split(), "--save", str(folder / "run"), *flags.split()])
    save = Path(str(config.checkpoint.save))
    try:
        end = str(run_training(config, World()))
    except MegaliteError as error:
        end = type(error).__name__
    written = save / "metrics.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    metrics = [{key: value for key, value in line.items() if not TIMES.search(key)} for line in lines]
    for line in metrics:
        line.pop("config", None)
    samples = save / "samples.jsonl"
    metrics += [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    names = (re.sub(r"\d{6,}(?!\d*$)", "N", str(path.relative_to(save))) for path in save.rglob("*"))
    return {"end": end, "metrics": metrics, "files": sorted(names)}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lambda: tmp_path_factory.mktemp("flags")


@cache
def reference(shared: str, make_folder: Any) -> dict[str, Any]:
    return observe(shared, make_folder())


# Every tenth row runs each time, all of them with --full.
@pytest.mark.parametrize(
    ("shared", "flags"),
    [
        pytest.param(*row, id=" ".join(row).strip(), marks=[pytest.mark.full] if number % 10 else [])
        for number, row in enumerate(ROWS)
    ],
)
def test_flag_changes_the_run(shared: str, flags: str, folder_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="megalite")  # put back afterwards
    assert observe(f"{shared} {flags}", folder_of()) != reference(shared, folder_of)


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[other for _, other in PAIRS])
def test_two_settings_differ(one: str, other: str, folder_of: Any) -> None:
    assert observe(one, folder_of()) != observe(other, folder_of())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*pair, id=pair[1], marks=[pytest.mark.full] if n in (0, 2, 4) else [])
        for n, pair in enumerate(LOADS)
    ],
)
def test_what_a_run_takes_up(one: str, other: str, folder_of: Any) -> None:
    seen = []
    for flags in (one, other):
        folder = folder_of()
        observe("--save-interval 2", folder / "before")
        seen.append(observe(flags.replace("DIR", str(folder / "before" / "run")), folder))
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("flags", "without"), WITHOUT.items())
def test_length_in_other_units(flags: str, without: str, folder_of: Any) -> None:
    changed = observe(flags, folder_of(), without)
    train = [line for line in changed["metrics"] if line["kind"] == "train"]
    assert len(train) == {"--train-samples 12": 3, "--train-tokens 200": 4}.get(flags, 4)


def test_the_reference_itself_repeats(folder_of: Any) -> None:
    assert observe("", folder_of()) == observe("", folder_of())


def test_every_flag_has_a_row_or_a_test_elsewhere() -> None:
    tests = Path(__file__).parents[2]
    own = " ".join([BASE, *(f"{a} {b}" for a, b in [*ROWS, *LOADS, *PAIRS]), *WITHOUT])
    others = "\n".join(
        path.read_text(encoding="utf-8")
        for path in tests.rglob("*.py")
        if path != Path(__file__) and path.parent.name != "config"
    )
    others += Path(__file__).read_text(encoding="utf-8").partition("# ---- beyond one rank")[2]
    for file, word in ELSEWHERE.values():
        assert word in (tests / file).read_text(encoding="utf-8")
    untested = []
    for name, option in all_options().items():
        flag = re.compile(re.escape(option.flag) + r"(?![\w-])")
        known = flag.search(
            own.replace("--disable-bias", "--add-bias").replace("--no-load", "--load").replace("--no-yarn", "--yarn")
        )
        if not known and option.flag not in ELSEWHERE and not re.search(rf"\b{name}\b|{flag.pattern}", others):
            untested.append(option.flag)
    assert not untested, "\n".join(untested)


# ---- beyond one rank -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1",
        "--pipeline-model-parallel-layout Et|tt|tt|tttL",
    ],
)
def test_layers_are_dealt_as_asked(flags: str) -> None:
    pipeline = "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 16"
    cuts = []
    for added in ("", flags):
        config = parse([*BASE.split(), *pipeline.split(), *added.split()], world_size=4)
        cuts.append(stage_layer_ranges(config, ProgramCache(config).full(4)))
    assert cuts[0] != cuts[1]
    assert [layer for cut in cuts[1] for layer in cut] == list(range(10))


def test_dry_run_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE.split(), "--save", str(tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "num_layers: 2" in printed and "# command line" in printed and "parameters" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matrix_precision_is_set_as_asked(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    config = parse([*BASE.split(), "--float32-matmul-precision", precision])
    set_matmul_precision(config, torch.device("cpu"), ParallelMesh.single().world)
    assert asked[-1] == precision


def test_messages_between_stages_are_checked_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []

    class Checked(mesh_channel.Channel):
        def __init__(self, *axes: Any, headers: bool = False) -> None:
            asked.append(headers)
            super().__init__(*axes, headers=headers)

    monkeypatch.setattr(mesh_channel, "Channel", Checked)
    for flags in ("", "--check-pipeline-messages"):
        observe(flags, tmp_path / flags)
    assert asked == [False, True]


def test_weights_and_biases_settings_reach_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    fake = mock.MagicMock()
    fake.init.side_effect = lambda **settings: calls.append(settings) or mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    observe("--wandb-project p --wandb-exp-name n --wandb-entity e --wandb-save-dir TEXT.d", tmp_path)
    (call,) = calls
    assert (call["project"], call["name"], call["entity"]) == ("p", "n", "e")
    assert str(call["dir"]).endswith("text.txt.d")
