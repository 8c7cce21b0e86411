"""Bad input: (flags or file) -> the exact lines, and nothing but these lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv, problems_of

from megalite.config import parse, parse_with_origins
from megalite.config.root import all_options
from megalite.config.values import bounds_problem, show

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
VPP = "--virtual-pipeline-model-parallel-size"


# (flags beside the base, world size, the one line)
ONE_LINE = [
    # heads, groups, positions
    ("--hidden-size 100", 1, "--hidden-size=100: not divisible by --num-attention-heads=8; try 96 or 104"),
    ("--num-query-groups 3", 1, "--num-query-groups=3: must divide --num-attention-heads=8; legal: 1,2,4,8"),
    (
        "--seq-length 4096 --max-position-embeddings 2048",
        1,
        "--seq-length=4096: exceeds --max-position-embeddings=2048 (learned positions); raise it or use "
        "--position-embedding-type rope",
    ),
    (
        "--position-embedding-type rope --rotary-percent 0.25",
        1,
        "--rotary-percent=0.25: rotates 3 of a head's 12 channels (--hidden-size / --num-attention-heads); "
        "RoPE needs an even number above 0",
    ),
    (
        "--activation swiglu --hidden-size 16",
        1,
        "--hidden-size=16: the default MLP width of --activation=swiglu would be 0; give --ffn-hidden-size",
    ),
    ("--recompute-method block", 1, "--recompute-method=block: needs --recompute-granularity=full"),
    # world and layout
    (
        f"{TP} 12 --num-attention-heads 12 --nprocs 24 {PP} 1 --hidden-size 96 --ffn-hidden-size 50",
        24,
        f"{TP}=12: does not divide the MLP width 50 (--ffn-hidden-size); try 48 or 60",
    ),
    (
        f"--num-attention-heads 12 {TP} 8",
        8,
        f"{TP}=8: does not divide --num-attention-heads=12; legal: 1,2,3,4,6,12",
    ),
    (f"--nprocs 8 {TP} 4 {PP} 4", None, f"world size 8: {TP} x {PP} = 16: use --nprocs 16, or torchrun with as many"),
    (f"--nprocs 12 {TP} 8", None, f"world size 12: not divisible by {TP} x {PP} = 8; use 8 or 16"),
    ("--nprocs 4", 2, "--nprocs=4: the launcher already started 2 processes; drop it"),
    (f"--num-layers 6 {PP} 8", 8, f"{PP}=8: more stages than --num-layers=6"),
    (f"{VPP} 2", 1, f"{VPP}=2: needs {PP} >= 2"),
    (
        f"{VPP} 4 {PP} 4 --global-batch-size 8",
        4,
        f"{VPP}=4: 4 ranks x 4 chunks = 16 stages, more than --num-layers=8",
    ),
    (
        f"--num-layers-per-virtual-pipeline-stage 3 {PP} 2 --global-batch-size 8",
        2,
        "--num-layers-per-virtual-pipeline-stage=3: --num-layers=8 is not a multiple of it times "
        f"{PP}=2; use {VPP}, which balances",
    ),
    (
        f"--decoder-first-pipeline-num-layers 9 {PP} 2 --global-batch-size 8",
        2,
        "--decoder-first-pipeline-num-layers=9: 9 layers on the end ranks and -1 for 1 ranks between them; the sum "
        "must be --num-layers=8",
    ),
    (
        f"--pipeline-model-parallel-layout Ettttt|ttttL {PP} 2 --global-batch-size 8",
        2,
        "--pipeline-model-parallel-layout=Ettttt|ttttL: holds 1 embeddings, 9 layers and 1 heads; the model is E, then "
        "--num-layers=8 times t, then L, in this order",
    ),
    (
        f"--pipeline-model-parallel-layout E|ttttttttL --decoder-last-pipeline-num-layers 3 {PP} 2 "
        "--global-batch-size 8",
        2,
        "--pipeline-model-parallel-layout=E|ttttttttL: contradicts --decoder-last-pipeline-num-layers=3; give one of "
        "them",
    ),
    (
        f"--sequence-parallel --seq-length 65 {TP} 2",
        2,
        f"--sequence-parallel: {TP}=2 does not divide --seq-length=65; try 64 or 66",
    ),
    # context parallelism
    (f"{CP} 2 --seq-length 66", 2, f"--seq-length=66: not divisible by 2 x {CP}=2 = 4; try 64 or 68"),
    (
        f"{CP} 2 {TP} 2 --sequence-parallel --seq-length 60",
        4,
        f"--seq-length=60: not divisible by 2 x {CP}=2 x {TP}=2 (--sequence-parallel) = 8; try 56 or 64",
    ),
    (f"{CP} 2 --cp-comm-type a2a --seq-length 65", 2, f"--seq-length=65: not divisible by {CP}=2 = 2; try 64 or 66"),
    (
        f"{CP} 4 --cp-comm-type a2a --num-query-groups 2",
        4,
        "--cp-comm-type=a2a: 4 ranks cannot trade the 2 key/value heads of a tensor-parallel rank "
        f"(--num-query-groups=2, {TP}=1); legal: 1,2, or --cp-comm-type=p2p",
    ),
    (
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3",
        4,
        "--hierarchical-context-parallel-sizes=2 3: --cp-comm-type=a2a+p2p with --context-parallel-size=4 needs two "
        "sizes whose product is 4, ranks that trade tokens for heads first",
    ),
    (
        f"{CP} 4 --hierarchical-context-parallel-sizes 2 2",
        4,
        "--hierarchical-context-parallel-sizes=2 2: needs --cp-comm-type=a2a+p2p; drop it",
    ),
    (f"{CP} 4", 2, f"world size 2: {TP} x {CP} x {PP} = 4: use --nprocs 4, or torchrun with as many"),
    # schedules and ZeRO
    (
        f"--pipeline-schedule 2bw {PP} 4 --micro-batch-size 4 --global-batch-size 8",
        4,
        "--pipeline-schedule=2bw: m = 2 micro-batches per batch with p = 4 ranks: rank 0 runs 3 forwards ahead and "
        "would need weights before their update (m >= p-1 = 3); raise --global-batch-size or use "
        "--pipeline-schedule=1f1b (legal: --global-batch-size=12)",
    ),
    (
        f"--pipeline-schedule 2bw {PP} 2 --global-batch-size 4 --zero-stage 3",
        2,
        "--zero-stage=3: not with --pipeline-schedule=2bw: gathering weights would need both weight versions at once; "
        "legal: 0,1",
    ),
    (
        "--pipeline-flush-steps 5",
        1,
        "--pipeline-flush-steps=5: 1f1b flushes after every iteration; drop it, or use 2bw",
    ),
    (
        f"--chimera-pairs 2 {PP} 2 --global-batch-size 4",
        2,
        "--chimera-pairs=2: 1f1b has no pairs of opposite pipelines; leave it out, or use --pipeline-schedule=chimera",
    ),
    ("--num-layers 99999999999999999999", 1, "--num-layers=99999999999999999999: must be >= 1 and <= 10000; try 10000"),
    ("--zero-stage 4", 1, "--zero-stage=4: choose 0, 1, 2 or 3"),
    (
        "--num-distributed-optimizer-instances 3 --zero-stage 1 --global-batch-size 4",
        4,
        "--num-distributed-optimizer-instances=3: must divide the data-parallel size 4; legal: 1,2,4",
    ),
    ("--distributed-backend nccl --device cpu", 1, "--distributed-backend=nccl: needs CUDA; use gloo"),
    # batch
    (
        "--global-batch-size 100 --micro-batch-size 8",
        4,
        "--global-batch-size=100: not divisible by --micro-batch-size=8 x data-parallel size 4 = 32; nearest 96 or 128",
    ),
    (
        "--global-batch-size 16 --micro-batch-size 8",
        4,
        "--global-batch-size=16: smaller than --micro-batch-size=8 x data-parallel size 4 = 32; use 32, or a smaller "
        "--micro-batch-size",
    ),
    ("--micro-batch-size 0", 1, "--micro-batch-size=0: must be >= 1; try 1"),
    (
        "--global-batch-size 16 --rampup-batch-size 4 5 100",
        1,
        "--rampup-batch-size=4 5 100: increments of 5 do not lead from 4 to --global-batch-size=16",
    ),
    (
        "--global-batch-size 16 --rampup-batch-size 4 4",
        1,
        "--rampup-batch-size=4 4: expected three numbers, START INCREMENT SAMPLES",
    ),
    (
        "--step-batch-size-schedule 5:8",
        1,
        "--step-batch-size-schedule='5:8': the first step must begin at 0 tokens; write it like '0:768 250B:1536'",
    ),
    (
        "--step-batch-size-schedule 0:8 --global-batch-size 8",
        1,
        "--global-batch-size=8: excludes --step-batch-size-schedule; give one of them",
    ),
    # length, learning rate, precision
    ("--lr -1e-4", 1, "--lr=-0.0001: must be > 0; 3e-4 is common"),
    ("--lr 3e-4x", 1, "--lr=3e-4x: not a number"),
    ("--lr nan", 1, "--lr=nan: not a finite number"),
    ("--num-layers 2.5", 1, "--num-layers=2.5: not an integer"),
    (
        "--lr-warmup-iters 2000 --train-iters 1000",
        1,
        "--lr-warmup-iters=2000: not below --train-iters=1000; use 100, or train longer",
    ),
    ("--train-iters 0", 1, "--train-iters=0: must be >= 1 and <= 1000000000; to only evaluate use --skip-train"),
    ("--train-samples 10", 1, "--train-samples=10: contradicts --train-iters=100; give one of them"),
    ("--clip-grad -1", 1, "--clip-grad=-1: must be >= 0; 0 disables it"),
    ("--min-lr 1", 1, "--min-lr=1: above --lr=0.001"),
    ("--lr-decay-style WSD", 1, "--lr-decay-style=WSD: needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"),
    (
        "--lr-decay-style cosin",
        1,
        "--lr-decay-style=cosin: choose constant, linear, cosine, inverse-square-root or WSD; did you mean cosine?",
    ),
    (
        "--weight-decay-incr-style linear --end-weight-decay 1",
        1,
        "--weight-decay-incr-style=linear: needs --start-weight-decay",
    ),
    (
        "--optimizer sgd --exp-avg-dtype bf16",
        1,
        "--exp-avg-dtype=bf16: not with --optimizer=sgd; it belongs to adam and lion",
    ),
    (
        "--optimizer-impl apex --exp-avg-dtype bf16",
        1,
        "--optimizer-impl=apex: keeps both moments in fp32; drop --exp-avg-dtype and --exp-avg-sq-dtype",
    ),
    (
        "--store-param-remainders",
        1,
        "--store-param-remainders: needs --bf16 (only a bf16 weight is the upper half of its master)",
    ),
    (
        "--bf16 --store-param-remainders --optimizer-cpu-offload",
        1,
        "--store-param-remainders: excludes --optimizer-cpu-offload; give one of them",
    ),
    (
        "--cpu-offloading-num-layers 1 --recompute-granularity full",
        1,
        "--cpu-offloading-num-layers=1: not with --recompute-granularity=full, which keeps nothing of a layer to "
        "offload; give one of them",
    ),
    (
        "--cpu-offloading-num-layers 1 --compile",
        1,
        "--cpu-offloading-num-layers=1: not with --compile, which decides itself what is kept",
    ),
    ("--optimizer-offload-fraction 0.5", 1, "--optimizer-offload-fraction=0.5: needs --optimizer-cpu-offload"),
    ("--bf16 --fp16", 1, "--fp16: contradicts --bf16; give one of them"),
    ("--loss-scale 128", 1, "--loss-scale=128: needs --fp16"),
    ("--swiglu --squared-relu", 1, "--squared-relu: contradicts --swiglu; give one of them"),
    (
        "--use-distributed-optimizer --zero-stage 2",
        1,
        "--zero-stage=2: contradicts --use-distributed-optimizer; give one of them",
    ),
    # names
    ("--hiden 512", 1, "unknown flag --hiden; did you mean --hidden-size?"),
    ("--num-layer 512", 1, "unknown flag --num-layer; did you mean --num-layers?"),
    ("--xyzzy 512", 1, "unknown flag --xyzzy; see --help"),
    (
        "--no-use-flash-attn",
        1,
        "--no-use-flash-attn: drop it: torch's attention takes the fastest kernel that the device has",
    ),
    (
        "--data-parallel-size 2",
        4,
        "--data-parallel-size: follows from the number of ranks: all / (tensor x pipeline x context parallel size)",
    ),
    (
        "--local-rank 2",
        1,
        "--local-rank: ranks are read from the launcher's environment; start them by torchrun",
    ),
    ("stray", 1, "unexpected argument 'stray'; flags begin with --"),
    ("--bf16 yes", 1, "unexpected argument 'yes'; --bf16 takes no value; --no-bf16 says the opposite"),
    ("--bf16=maybe", 1, "--bf16: expected true/false, got text 'maybe'"),
    ("--save d --save-interval 0", 1, "--save-interval=0: must be >= 1; leave it out to save only at the end"),
    ("--ckpt-step 5", 1, "--ckpt-step=5: needs --load"),
    ("--use-checkpoint-args", 1, "--use-checkpoint-args: needs --load"),
    (
        "--load . --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        "--use-checkpoint-opt-param-scheduler: contradicts --override-opt-param-scheduler; give one of them",
    ),
    (
        "--save d --save-interval 10 --save-retain-interval 25",
        1,
        "--save-retain-interval=25: not a multiple of --save-interval=10; try 20 or 30",
    ),
    ("--wandb-exp-name x", 1, "--wandb-exp-name=x: needs --wandb-project"),
    (
        "--trace-pipeline x.gif",
        1,
        "--trace-pipeline=x.gif: unknown form; end the name in .html, .svg, .json or .txt",
    ),
    ("--profile --profile-step-end 5", 1, "--profile-step-end=5: not above --profile-step-start=10"),
    (
        f"--sample-interval 2 --sample-prompts {__file__} --skip-train",
        1,
        "--sample-interval=2: has no effect with --skip-train; drop it, and use tools/generate_text.py",
    ),
    ("--profile --profile-ranks 3", 1, "--profile-ranks=3: there are 1 ranks (0 to 0)"),
    ("--split 1,2,x", 1, "--split=1,2,x: expected up to three weights such as 969,30,1, not all 0"),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file /dev/null",
        1,
        "--tokenizer-type=GPT2BPETokenizer: needs --merge-file",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "line"), ONE_LINE, ids=[row[0][:60] for row in ONE_LINE])
def test_one_problem_gives_exactly_one_line(changes: str, world_size: int | None, line: str) -> None:
    assert problems_of(argv(changes), world_size) == [line]


def test_the_base_itself_is_legal() -> None:
    parse(argv())


def test_all_problems_come_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model:\n  num_layer: 3\ntraining:\n  bf16: 'no'\n")
    lines = problems_of(
        [
            "--config",
            "run.yaml",
            *argv("--hidden-size 100 --lr 3e-4x --zero-stage 9 --foo bar --clip-grad -2", "seq-length"),
        ]
    )
    assert lines == [
        "--lr=3e-4x: not a number",
        "unknown flag --foo; see --help",
        "run.yaml:2: unknown key 'num_layer'; did you mean 'num_layers'?",
        "run.yaml:4: bf16: expected true/false, got text 'no'",
        "--seq-length: required (as a flag, or as 'seq_length' in a --config file)",
        "--zero-stage=9: choose 0, 1, 2 or 3",
        "--clip-grad=-2: must be >= 0; 0 disables it",
        "--hidden-size=100: not divisible by --num-attention-heads=8; try 96 or 104",
    ]


def test_every_broken_bound_names_the_range_and_what_to_do() -> None:
    """For each bound of each option: a value beyond it, told with a value that is legal or with the option's advice."""
    seen = 0
    for option in all_options().values():
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if name not in option.facts:
                continue
            seen += 1
            value = option.kind(option.facts[name] + step)
            what, _, advice = (bounds_problem(option, (value,) if option.many else value) or "").partition("; ")
            if what.startswith("choose"):
                continue
            assert show(option.facts[name]) in what and advice, f"{option.flag}={value}: {what}"
            if advice.startswith("try "):
                assert bounds_problem(option, option.kind(advice.removeprefix("try "))) is None, option.flag
    assert seen > 90
    (line,) = problems_of(argv("--optimizer-cpu-offload --optimizer-offload-fraction 1.5"))
    assert line == "--optimizer-offload-fraction=1.5: must be > 0 and <= 1; 1 is all of them"


def test_nothing_given_names_what_is_required() -> None:
    lines = problems_of([])
    required = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "lr")
    for flag in required:
        assert any(line.startswith(f"--{flag}: required") for line in lines)
    assert len(lines) == len(required) + 1  # and the length of the training


@pytest.mark.parametrize(
    ("changes", "world_size", "begin"),
    [
        ("--sequence-parallel", 1, "--sequence-parallel: has no effect"),
        ("--cp-comm-type a2a", 1, "--cp-comm-type=a2a: has no effect at --context-parallel-size=1; drop it"),
        (
            "--context-parallel-size 2 --window-size 8",
            2,
            "--window-size=8: each rank is sent all 64 keys, of which a token sees 8; --cp-comm-type=a2a sends less",
        ),
        ("--split 90,5", 1, "--split=90,5: has no effect without --data-path"),
        ("--fp16 --device cpu", 1, "--fp16: slow on a CPU"),
        ("--lr 1.5", 1, "--lr=1.5: unusually high"),
        ("--lion-beta1 0.5", 1, "--lion-beta1=0.5: has no effect with --optimizer=adam; drop it"),
        (
            "--optimizer-args sgd_momentum=0.5",
            1,
            "--optimizer-args sgd_momentum=0.5: has no effect with --optimizer=adam",
        ),
        ("--hysteresis 3", 1, "--hysteresis=3: has no effect without --fp16; add that, or drop this"),
        (f"--pipeline-schedule 2bw {PP} 4 --global-batch-size 3", 4, "--pipeline-schedule=2bw: m = p-1 = 3"),
    ],
)
def test_doubtful_settings_are_warned_of(changes: str, world_size: int, begin: str) -> None:
    (line,) = parse_with_origins(argv(changes), world_size=world_size).warnings
    assert line.startswith(begin)
