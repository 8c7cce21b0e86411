"""What is accepted and ignored, or means nothing beside another setting: told in one line, or refused."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import Offer, parse, parse_with_origins
from megalite.config.rules.lora import adapted_sizes
from megalite.inventory import adapters_of

ROPE = "--position-embedding-type rope"
MOE = "--num-experts 4"
PIPE = "--pipeline-model-parallel-size 2 --nprocs 2 --global-batch-size 8"

#: Flags -> what the one warning begins with.
TOLD = [
    ("--rotary-base 5e5", "--rotary-base=500000: has no effect with --position-embedding-type=learned_absolute"),
    ("--rotary-percent 0.5", "--rotary-percent=0.5: has no effect with --position-embedding-type=learned_absolute"),
    ("--use-rope-scaling", "--use-rope-scaling: has no effect with --position-embedding-type=learned_absolute"),
    ("--rotary-seq-len-interpolation-factor 2", "--rotary-seq-len-interpolation-factor=2: has no effect with"),
    (f"{ROPE} --no-rope-freq 1", "--position-embedding-type=rope: has no effect with --no-rope-freq=1, which leaves"),
    ("--reset-position-ids --position-embedding-type none", "--reset-position-ids: has no effect with"),
    ("--window-size 64", "--window-size=64: has no effect with --seq-length=64"),
    ("--attention-softmax-in-fp32", "--attention-softmax-in-fp32: has no effect in fp32"),
    ("--fp32-residual-connection --fp64", "--fp32-residual-connection: has no effect in fp64"),
    ("--float32-matmul-precision high --fp64", "--float32-matmul-precision=high: has no effect with --fp64"),
    (f"{MOE} --moe-router-load-balancing-type seq_aux_loss", "--moe-router-load-balancing-type=seq_aux_loss: has no"),
    (f"{MOE} --moe-ffn-hidden-size 64 --ffn-hidden-size 128", "--ffn-hidden-size=128: has no effect where every"),
    (
        f"{MOE} --moe-router-pre-softmax --moe-router-score-function sigmoid",
        "--moe-router-pre-softmax: has no effect with --moe-router-score-function=sigmoid",
    ),
    (f"{ROPE} --rope-scaling-type yarn", "--rope-scaling-type=yarn: has no effect without --use-rope-scaling; add"),
    (f"{MOE} --moe-expert-capacity-factor 2", "--moe-expert-capacity-factor=2: has no effect at this size"),
    ("--lr-decay-style constant --min-lr 1e-5", "--min-lr=1e-05: has no effect with --lr-decay-style=constant"),
    ("--lr-decay-style constant --lr-decay-iters 50", "--lr-decay-iters=50: has no effect with"),
    ("--lr-wsd-decay-style linear", "--lr-wsd-decay-style=linear: has no effect with --lr-decay-style=linear"),
    ("--lr-warmup-init 1e-5", "--lr-warmup-init=1e-05: has no effect without a warm-up"),
    (
        "--weight-decay 0.5 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        "--weight-decay=0.5: has no effect with --weight-decay-incr-style=linear",
    ),
    ("--fp16 --loss-scale 8 --initial-loss-scale 2", "--initial-loss-scale=2: has no effect with --loss-scale"),
    ("--fp16 --loss-scale 8 --hysteresis 3", "--hysteresis=3: has no effect with --loss-scale"),
    ("--fp16 --loss-scale 8 --loss-scale-window 3", "--loss-scale-window=3: has no effect with --loss-scale"),
    (
        "--max-skipped-updates 3",
        "--max-skipped-updates=3: has no effect without --fp16, --nonfinite=skip or --on-spike=skip, where no update",
    ),
    ("--eval-interval 10 --eval-iters 0", "--eval-interval=10: has no effect with --eval-iters=0"),
    ("--full-validation --eval-iters 0", "--full-validation: has no effect with --eval-iters=0"),
    ("--full-validation --eval-iters 7", "--eval-iters=7: has no effect with --full-validation"),
    ("--skip-train --load . --exit-interval 5", "--exit-interval=5: has no effect with --skip-train"),
    ("--skip-train --load . --save d --save-interval 5", "--save-interval=5: has no effect with --skip-train"),
    ("--skip-train", "--skip-train: without --load a random model is evaluated"),
    ("--allow-data-change", "--allow-data-change: has no effect without --load"),
    ("--save-interval 5", "--save-interval=5: has no effect without --save; add that, or drop this"),
    ("--async-save", "--async-save: has no effect without --save; add that, or drop this"),
    ("--no-load-rng", "--no-load-rng: has no effect without --load; drop it"),
    ("--no-load-optim", "--no-load-optim: has no effect without --load; drop it"),
    ("--override-opt-param-scheduler", "--override-opt-param-scheduler: has no effect without --load; drop it"),
    (
        "--load . --skip-train --use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler: has no effect with --skip-train, which takes no schedules from --load",
    ),
    ("--load . --finetune --override-opt-param-scheduler", "--override-opt-param-scheduler: has no effect with --fin"),
    ("--load . --finetune --no-load-optim", "--no-load-optim: has no effect with --finetune"),
    ("--fp8-format e4m3 --fp8-amax-history-len 16", "--fp8-amax-history-len=16: has no effect with --fp8-recipe=tens"),
    ("--check-pipeline-messages", "--check-pipeline-messages: has no effect without pipeline ranks"),
    ("--profile --profile-step-start 200 --profile-step-end 210", "--profile-step-start=200: has no effect, the"),
    ("--exit-interval 500", "--exit-interval=500: has no effect, the training ends after 100 iterations"),
    ("--iterations-to-skip 3 200", "--iterations-to-skip=200: has no effect, the training ends after 100 iterations"),
    (
        f"--sample-interval 500 --sample-prompts {__file__}",
        "--sample-interval=500: has no effect, the training ends after 100 iterations",
    ),
    (f"--pipeline-schedule 2bw --pipeline-flush-steps 500 {PIPE}", "--pipeline-flush-steps=500: no iteration of 100"),
    ("--rampup-batch-size 2 2 1000000 --global-batch-size 8", "--rampup-batch-size=2 2 1000000: 4 is never reached"),
    ("--init-method-std 0", "--init-method-std=0: matrices that are all 0"),
    ("--lr 0.05 --weight-decay 20", "--weight-decay=20: times --lr=0.05 a step takes whole weights away"),
    (
        "--lora-rank 24 --lora-targets q_proj k_proj --load . --num-query-groups 1",
        "--lora-rank=24: above the smaller side of k, 12, whose adapter has more numbers than it",
    ),
    ("--cp-comm-type a2a", "--cp-comm-type=a2a: has no effect at --context-parallel-size=1; drop it"),
]
#: A schedule, which is one word with spaces in it.
STEPS = [
    ("--seq-length-schedule", "0:32 1T:64", "64 is never reached, the training ends after 100 samples"),
    ("--seq-length-schedule", "0:64", "has no effect with one length; drop it"),
    ("--step-batch-size-schedule", "0:8 1B:16", "16 is never reached, the training ends after 800 samples"),
]
REFUSED = [
    (
        "--lora-rank 1000",
        "--lora-rank=1000: above the smaller side of every adapted matrix, 96 at most (fc1); use less, or train the "
        "model whole",
    ),
    (
        "--lora-rank 97 --lora-targets q_proj",
        "--lora-rank=97: above the smaller side of every adapted matrix, 96 at most (q); use less, or train the model "
        "whole",
    ),
    (
        "--lr-warmup-samples 200",
        "--lr-warmup-samples=200: 200 samples, not below the 100 samples until the decay's end; warm up less, or train "
        "longer",
    ),
    (
        "--lr-warmup-iters 50 --lr-decay-samples 200 --global-batch-size 4",
        "--lr-warmup-iters=50: 200 samples, not below the 200 samples until the decay's end; warm up less, or train "
        "longer",
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 101",
        "--lr-wsd-decay-iters=101: 101 samples, above the 100 samples until the decay's end; decay less, or train "
        "longer",
    ),
    ("--skip-train --eval-iters 0", "--skip-train: with --eval-iters=0 there is nothing to do; drop one of them"),
]
#: Legal where data are made up too: a trial of speed and memory, a comparison of layouts.
SENSELESS = [
    (
        "--lora-rank 4",
        "--lora-rank=4: without --load the model beside the adapters is random; add --load MODEL (only --mock-data "
        "does without)",
    ),
    (
        "--fp64 --fp8-format e4m3",
        "--fp8-format=e4m3: of the 16 digits of --fp64 its products keep one or two; use --bf16 (both, to compare "
        "layouts, only with --mock-data)",
    ),
]
#: Nothing is said of what has an effect.
SILENT = [
    "",
    f"{ROPE} --rotary-base 5e5 --no-rope-freq 2",
    "--window-size 63",
    "--bf16 --attention-softmax-in-fp32 --fp32-residual-connection",
    "--fp16 --hysteresis 3 --max-skipped-updates 3",
    "--nonfinite skip --max-skipped-updates 3",
    "--lr-warmup-iters 5 --lr-warmup-init 1e-5 --min-lr 1e-5 --lr-decay-iters 50",
    "--save d --save-interval 10 --save-retain-interval 20 --keep-last-n 2",
    "--save d --save-interval 10 --save-retain-interval 20",
    "--exit-interval 100 --iterations-to-skip 100 --eval-interval 10 --eval-iters 2",
    f"{MOE} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1.9",
    f"{MOE} --moe-ffn-hidden-size 64 --ffn-hidden-size 128 --moe-layer-freq 2",
    "--skip-train --load .",
    "--lora-rank 96 --load .",
]


def warnings_of(arguments: list[str]) -> tuple[str, ...]:
    world_size = 2 if "--nprocs" in arguments else 1
    return parse_with_origins(arguments, world_size=world_size).warnings


@pytest.mark.parametrize(("changes", "begin"), TOLD, ids=[row[0] for row in TOLD])
def test_what_is_ignored_is_told_in_one_line(changes: str, begin: str) -> None:
    (line,) = warnings_of(argv(changes))
    assert line.startswith(begin)


@pytest.mark.parametrize(("flag", "text", "rest"), STEPS)
def test_steps_that_are_never_taken(flag: str, text: str, rest: str) -> None:
    assert warnings_of([*argv(), flag, text]) == (f"{flag}={text}: {rest}",)


@pytest.mark.parametrize(("changes", "line"), SENSELESS)
def test_what_only_a_trial_can_want_is_refused_with_real_data(changes: str, line: str) -> None:
    assert problems_of(argv(changes, without="mock-data"), 1) == [line]
    assert warnings_of(argv(changes)) == ()


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_meant_is_refused(changes: str, line: str) -> None:
    assert problems_of(argv(changes), 1) == [line]


def test_a_length_schedule_gives_the_shorter_ones_first() -> None:
    for text, pair in (("0:64 1000:32", "32 comes after 64"), ("0:16 1M:64 2M:32 3M:64", "32 comes after 64")):
        (line,) = problems_of([*argv(), "--seq-length-schedule", text])
        assert line == (
            f"--seq-length-schedule='{text}': {pair}; shorter sequences come first, give the lengths as they rise"
        )


@pytest.mark.parametrize("changes", SILENT)
def test_what_has_an_effect_is_not_spoken_of(changes: str) -> None:
    assert warnings_of(argv(changes)) == ()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_sizes_of_adapted_matrices_are_those_of_their_adapters(family: str) -> None:
    given = f"--lora-rank 4 --load . --num-query-groups 2 --ffn-hidden-size 128 --model-type {family}"
    model = parse(argv(given)).model
    found = {
        adapter.name: (adapter.a.shape[1], adapter.b.numel // adapter.b.shape[-1])
        for linear in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
        for adapter in adapters_of(model, linear)
    }
    assert adapted_sizes(model) == found and len(found) == len(model.adapted_parts)


def test_nothing_is_said_of_a_value_that_came_with_the_model() -> None:
    """gpt-oss has the size of MLPs that it has none of."""
    model = parse(argv(f"{MOE} --moe-ffn-hidden-size 64 --ffn-hidden-size 128")).model
    flags = (
        "--load here --use-checkpoint-args --micro-batch-size 1 --lr 1e-3 --train-iters 2 --seq-length 64 --mock-data"
    )

    def doubts(more: str = "") -> list[str]:
        read = parse_with_origins([*flags.split(), *more.split()], check_files=False, read_offer=lambda *_: offer)
        return [line for line in read.warnings if "has no effect" in line]

    offer = Offer("here/config.json", model, {"tokenizer_type": "NullTokenizer"})
    assert doubts() == []
    (line,) = doubts("--ffn-hidden-size 128")
    assert line.startswith("--ffn-hidden-size=128: has no effect where every block has experts")
    (line,) = doubts("--exit-signal-handler --lr-warmup-init 1e-5")
    assert line.startswith("--lr-warmup-init=1e-05: has no effect")
