"""Running the product on ranks and comparing what it saved with the oracle; drawing layouts."""

from __future__ import annotations

import math
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from equivalence.drawn_models import FURTHER, GATES, MIXERS, draw_experts, draw_model, other_adapters
from megalite.checkpoint import CheckpointReader, resolve_checkpoint
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.errors import ConfigError
from megalite.planner import within_budget
from megalite.schedule import SCHEDULES, build_program, find_schedule
from megalite.testing import run_ranks
from megalite.testing.harness import PATIENCE_SECONDS
from megalite.testing.oracle import Trajectory, pipedream_reference, reference
from megalite.train.run import open_run

VOCABULARY = 61
TINY = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 8 --train-iters 50 --lr 1e-2 "
    "--lr-decay-style constant --weight-decay 0.1 --adam-eps 1e-5 --fp64 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --eval-iters 0 --num-workers 0 "
    "--no-exit-signal-handler --distributed-timeout-minutes 0.2 --staleness-correction none"
).split()


def train_body(world: World, argv: list[str], steps: int) -> tuple[list[float], list[float | None]]:
    """Losses and norms of `steps` iterations through the product; the state is saved at the end."""
    config = parse(argv, world_size=world.size)
    losses, norms = [], []
    with open_run(config, world) as run:
        for step in range(steps):
            stats = run.trainer.train_step(drain=step == steps - 1)
            losses.append(float(stats.lm_loss))
            norms.append(None if stats.grad_norm is None else float(stats.grad_norm))
        if config.checkpoint.save is not None:
            run.state.save(run.trainer.progress)
    return losses, norms


def saved_tensors(directory: Path | str) -> dict[str, Tensor]:
    """Every logical tensor of a checkpoint (of the newest one of a run directory), whole, in its own dtype."""
    reader = CheckpointReader(resolve_checkpoint(directory))
    return {name: reader.read(name) for name in reader.names if name != "optimizer/step"}


def train(
    argv: list[str], world_size: int, steps: int, timeout: float = PATIENCE_SECONDS, body=train_body, more: tuple = ()
) -> Trajectory:
    """The product's trajectory on `world_size` ranks. body: what each runs, with `more` behind its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        full = [*argv, "--save", folder, "--data-cache-path", str(Path(folder).parent / "megalite-test-cache")]
        results = run_ranks(body, world_size, full, steps, *more, timeout=timeout)
        losses, norms = results[0]
        assert all(result == results[0] for result in results), "the ranks disagree about losses or norms"
        return Trajectory(losses, norms, saved_tensors(folder))


def least_budget(argv: list[str], world_size: int) -> list[str]:
    """The least budget of device memory that such a run can keep without recomputation of whole layers, and a little
    more: all that can move does."""
    kept = [] if "--recompute-activations" in argv else ["--recompute-granularity", "none"]
    flags = [*kept, "--device-memory-budget-gb"]
    try:
        within_budget(parse([*argv, *flags, "1e-5"], world_size=world_size), world_size, on_cpu=True)
    except ConfigError as error:
        enough = re.search(r"come and go; ([\d.e+-]+) are", str(error))
        assert enough is not None, error
        return [*flags, str(1.02 * float(enough[1]))]
    raise AssertionError("10 kB are enough")


@dataclass(frozen=True)
class Layout:
    """A drawn configuration: what the model is and how it is trained, and how it is spread.

    delay: of 2BW, 1. stages, together: of PipeDream, 0 elsewhere, and the samples of an update. lags: of its stages,
    where they are not p-1-r.
    """

    model: tuple[str, ...]
    layout: tuple[str, ...]
    world_size: int
    delay: int = 0
    stages: int = 0
    together: int = 1
    lags: tuple[int, ...] = ()

    def expected(self, steps: int) -> Trajectory:
        """The oracle's answer."""
        argv = (*TINY, "--micro-batch-size", "1", *self.model)
        if self.stages:
            return pipedream_reference(argv, steps, self.stages, self.together, self.lags)
        return reference(argv, steps, self.delay)

    @property
    def schedule(self) -> str:
        flags = [*self.layout]
        return flags[flags.index("--pipeline-schedule") + 1] if "--pipeline-schedule" in flags else "1f1b"

    @property
    def command(self) -> str:
        flags = " ".join([*TINY, *self.model, *self.layout])
        return f"python pretrain_gpt.py --nprocs {self.world_size} {flags}"


def compare(
    case: Layout,
    *,
    steps: int = 3,
    tolerance: float = 1e-12,
    timeout: float = PATIENCE_SECONDS,
    body=train_body,
    more: tuple = (),
) -> float:
    """Asserts that the layout trains as the oracle does; returns the largest difference of a tensor. body, more: see
    `train`."""
    expected = case.expected(steps)
    tolerance *= expected.magnified
    found = train([*TINY, *case.model, *case.layout], case.world_size, steps, timeout, body, more)
    try:
        assert_close(found.losses, expected.losses, tolerance, "loss")
        if not case.stages:  # there is no norm over PipeDream's pipeline
            assert_close(found.norms, expected.norms, tolerance, "gradient norm")
        # PipeDream has taken a step for every micro-batch.
        return assert_same_tensors(found.tensors, expected, tolerance * (100 if case.stages else 10))
    except AssertionError as error:
        raise AssertionError(f"{error}\nreplay: {case.command}") from None


def assert_same_tensors(found: dict[str, Tensor], expected: Trajectory, tolerance: float) -> float:
    """Weights and moments; returns the largest difference."""
    missing = set(expected.tensors) ^ {name for name in found if not name.startswith("previous/")}
    assert not missing, f"names differ: {sorted(missing)[:4]}"
    worst = 0.0
    for name, value in expected.tensors.items():
        got = found[name].to(value.dtype)
        if "_basis/" in name:  # an eigenvector has no sign
            got, value = got.abs(), value.abs()
        difference = (got - value).abs()
        unsettled = expected.unsettled.get(name.removeprefix("optimizer/ema/"))  # an average follows its weight
        if unsettled is not None:
            difference = difference[~unsettled]
        most = float(difference.max())
        worst = max(worst, most)
        # A weight has taken some Adam steps, which magnify rounding by 1 / eps at most (eps 1e-5).
        assert most <= tolerance, f"{name} differs by {most:.3g}"
    return worst


def assert_close(found, expected, tolerance: float, what: str) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a is b is None or (a is not None and b is not None and abs(a - b) <= tolerance * max(1.0, abs(b))), (
            f"{what} of step {step}: {a} instead of {b}"
        )


VARIANTS: dict[str, str] = {
    "adam": "",
    "adam in 16 bits": "--optimizer-state exp_avg_dtype=fp16 exp_avg_sq_dtype=bf16",
    "lion": "--optimizer lion --lr 1e-3",
    "lion in 16 bits": "--optimizer lion --lr 1e-3 --optimizer-state exp_avg_dtype=bf16",
    "soap": "--optimizer soap --optimizer-args soap_eps=1e-4 soap_max_precond_dim=32 soap_precondition_frequency=1",
    "shampoo": "--optimizer shampoo --shampoo-matrix-eps 1e-4 --shampoo-max-precond-dim 40",
    "kfac": "--optimizer kfac --kfac-inverse-frequency 2 --kfac-kl-clip 1e-7",
    "adafactor by size": "--optimizer adafactor --optimizer-args adafactor_scale_parameter",
}
ALL = VARIANTS | {name: f"--optimizer {name}" for name in OPTIMIZER_SPECS if name not in VARIANTS}
OPTIMIZERS = {name: flags for name, flags in ALL.items() if name != "kfac"}  # which goes with less: test_kfac.py
RAMPS = (
    "--lr-decay-style cosine --lr-warmup iters=2 init=1e-3 --min-lr 1e-3 --train-iters 6 "
    "--weight-decay-ramp start=0.05 end=0.4 style=linear",
    "--lr-decay-style inverse-square-root --lr-warmup iters=1 --train-iters 6 --weight-decay-ramp start=0.4 "
    "--weight-decay-ramp end=0 style=cosine",
    "--lr-decay-style linear --train-iters 4 --min-lr 5e-4",
)
"""Learning rates and weight decays that no two of the first steps share."""


ADAPTED = [[], ["--lora", "targets=linear_qkv", "linear_fc2"], ["--lora", "targets=linear_q", "linear_v", "linear_fc1"]]


def _with_others(case: Layout) -> Layout:
    """The case with a state in attention's place, further tokens or another gate, now and then, where it can have them.
    By coins of its own, so that everything else is drawn as it was."""
    coin = random.Random(f"others of {case.command}")
    for share, choices in ((0.2, MIXERS), (0.15, FURTHER), (0.1, GATES)):
        added = coin.choice(choices).split()
        # gates of rank 4 in 32 channels leave SOAP's basis open, as adapters do
        barred = choices is MIXERS and ("--mla" in case.model or "soap" in case.model)
        if coin.random() > share or barred:
            continue
        found = replace(case, model=(*case.model, *added))
        case = found if is_legal(found) else case
    return case


def _with_other_adapters(case: Layout) -> Layout:
    """The case with other adapters, or a base in 8 bits, now and then. By a coin of its own."""
    tried = (replace(case, model=model) for model in other_adapters(case.model, f"adapters of {case.command}"))
    return next(filter(is_legal, tried), case)


def _with_arrivals(case: Layout) -> Layout:
    """Now and then a flushing schedule becomes the message-driven one. By a coin of its own."""
    if case.schedule not in FLUSH or random.Random(f"arrivals of {case.command}").random() > 0.1:
        return case
    flags = [ARRIVES if word == case.schedule else word for word in case.layout]
    found = replace(case, layout=tuple(flags))
    return found if is_legal(found) else case


def _with_partition(case: Layout) -> Layout:
    """Now and then weights under ZeRO-3 are gathered in partitions. By a coin of its own."""
    found = replace(case, layout=(*case.layout, "--zero-plus-plus", "partition=2"))
    return found if random.Random(f"partition of {case.command}").random() < 0.3 and is_legal(found) else case


def draw(
    rng: random.Random,
    optimizer: str | None = None,
    want: Callable[[Layout], bool] = lambda case: True,
    more: Sequence[str] = (),
) -> Layout:
    """A random configuration that the product's own validator accepts; optimizer: of `OPTIMIZERS`, any where none is
    given. more: flags of every model."""
    while True:
        case = drawn(rng, optimizer or rng.choice(list(OPTIMIZERS)))
        case = with_stage_meshes(case, random.Random(case.command))
        case = with_grid(case, random.Random(f"grid of {case.command}"))
        case = replace(case, model=(*case.model, *_draw_aids(case), *more))
        case = _with_partition(_with_arrivals(_with_other_adapters(_with_others(case))))
        if want(case) and is_legal(case):
            return case


def is_legal(case: Layout) -> bool:
    """Whether the product's validator accepts it."""
    with suppress(ConfigError):
        parse([*TINY, *case.model, *case.layout], world_size=case.world_size)
        return True
    return False


def _draw_aids(case: Layout) -> list[str]:
    """What aids a training: by coins of their own, so that everything else is drawn as it was."""
    coin = random.Random(case.command)
    apart = coin.random() >= 0.15 or "embedding" in case.layout
    flags = [] if apart else ["--ema-decay", coin.choice(["0.5", "0.99"])]
    flags += ["--z-loss-coeff", "0.03", "--softcapping", "final=0.7"] if coin.random() < 0.15 else []
    flags += ["--decoupled-lr", "2e-2"] if coin.random() < 0.15 and "--lora" not in case.model else []
    ruled, deep = not {"--lora", "--optimizer"} & {*case.model}, coin.choice([[], ["base_num_layers=1"]])
    return flags + (["--mup", "base_hidden_size=8", *deep] if coin.random() < 0.15 and ruled else [])


MESHES = ("1x2,1x1", "1x1,1x2", "2x1,1x1", "1x1,2x1", "2x1,1x2", "1x2,2x1", "1x2,1x1,1x1", "1x1,1x2,1x1", "4x1,1x2")
"""Those of more than four ranks last."""
UNLIKE = 0.45
"""Of the draws so many are tried with stages that differ; some of these are refused."""
OF_ALIKE = (
    "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size --cp-comm-type "
    "--hierarchical-context-parallel-sizes --virtual-pipeline-model-parallel-size --tp-comm-overlap "
    "--num-distributed-optimizer-instances --expert-model-parallel-size --expert-tensor-parallel-size "
    "--pipeline-schedule"
).split()
"""Flags of a layout whose stages are alike."""


def with_stage_meshes(case: Layout, rng: random.Random) -> Layout:
    """The case with stages that differ, now and then, where it can have them. rng: of its own, so that what is drawn
    next does not depend on it."""
    if rng.random() > UNLIKE:
        return case
    flags = [word.split() for word in " ".join(case.layout).replace(" --", "\n--").splitlines()]
    kept = [word for flag in flags for word in flag if flag[0] not in OF_ALIKE and flag[1:2] != ["params"]]
    if "--fp8-format" in case.model:  # without halves a micro-batch of two has scales of its own
        kept[kept.index("--micro-batch-size") + 1] = "1"
    turns = [name for name, entry in SCHEDULES.items() if entry.takes_turns]
    schedule = case.schedule if case.schedule in turns else rng.choice(["1f1b", "zb-h1", "gpipe", "eager-1f1b"])
    for meshes in rng.sample(MESHES, 4):
        sizes = [tuple(map(int, mesh.split("x"))) for mesh in meshes.split(",")]
        layout = ("--stage-meshes", meshes, "--pipeline-schedule", schedule, *kept)
        found = replace(case, layout=layout, world_size=sum(tp * dp for tp, dp in sizes))
        if case.stages:
            workers = tuple(dp for _, dp in sizes)
            lags = build_program("pipedream", len(sizes), 8 * math.lcm(*workers), workers=workers).staleness
            size = int(kept[kept.index("--micro-batch-size") + 1])
            found = replace(found, stages=len(sizes), together=size * math.lcm(*workers), lags=lags)
        if is_legal(found):
            return found
    return case


GRIDS = {
    4: ("2d", "4d --tensor-parallel-grid 2 2 1", "4d --tensor-parallel-grid 2 1 2", "4d --tensor-parallel-grid 1 4 1"),
    8: ("3d", "2.5d", "4d --tensor-parallel-grid 1 2 4", "4d --tensor-parallel-grid 4 1 2"),
}
OF_A_LINE = "sequence-parallel tp-comm-overlap context-parallel-size cp-comm-type hierarchical-context-parallel-sizes"


def with_grid(case: Layout, rng: random.Random, share: float = 0.3) -> Layout:
    """The case with its tensor-parallel ranks as a grid, now and then, where it can have one. rng: as above."""
    flags = [word.split() for word in " ".join(case.layout).replace(" --", "\n--").splitlines()]
    kept = {flag[0]: flag[1:] for flag in flags if flag[0][2:] not in OF_A_LINE.split()}
    if rng.random() > share or "--stage-meshes" in kept or case.stages:
        return case
    pp = int(kept["--pipeline-model-parallel-size"][0])
    choices = [(ranks, mode) for ranks, modes in GRIDS.items() for mode in modes if ranks * pp <= 8]
    for ranks, mode in rng.sample(choices, len(choices)):
        kept["--tensor-model-parallel-size"], kept["--micro-batch-size"] = [str(ranks)], [rng.choice(["2", "4"])]
        kept["--tensor-parallel-mode"] = mode.split()
        layout = tuple(word for name, values in kept.items() for word in (name, *values))
        found = replace(case, layout=layout, world_size=ranks * pp * rng.choice([1, 8 // (ranks * pp)]))
        if is_legal(found):
            return found
    return case


ARRIVES = "message-driven"
FLUSH = ["1f1b", *(name for name, s in SCHEDULES.items() if not s.asynchronous and name not in ("1f1b", ARRIVES))]


CP_KINDS = {
    2: [[], ["--cp-comm-type", "all_gather"], ["--cp-comm-type", "a2a"]],
    4: [
        [],
        ["--cp-comm-type", "all_gather"],
        ["--cp-comm-type", "a2a"],
        ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"],
    ],
}


def drawn(rng: random.Random, optimizer: str) -> Layout:
    """One that the validator may refuse."""
    pick = rng.choice
    grids = [(tp, pp, dp) for tp in (1, 1, 2, 4) for pp in (1, 1, 2, 3, 4) for dp in (1, 1, 2, 4) if tp * pp * dp <= 8]
    tp, pp, dp = pick(grids)
    cp = pick([1, 1, *(size for size in (2, 4) if tp * pp * dp * size <= 8)])
    schedule = pick([*FLUSH, "2bw", "2bw", "pipedream"]) if pp > 1 else pick(["1f1b", "1f1b", "2bw"])
    layout = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    layout += ["--pipeline-schedule", schedule, "--zero-stage", pick(["0", "1", "2", "3"])]
    layout += ["--context-parallel-size", str(cp), *pick(CP_KINDS[cp])] if cp > 1 else []
    layout += ["--virtual-pipeline-model-parallel-size", "2"] if find_schedule(schedule).min_chunks > 1 else []
    size = pick([1, 1, 2])
    layout += ["--micro-batch-size", str(size)]
    layout += ["--sequence-parallel"] if tp > 1 and rng.random() < 0.5 else []
    layout += ["--tp-comm-overlap"] if tp > 1 and size == 2 and rng.random() < 0.5 else []
    layout += pick(
        [[], ["--recompute-activations"], ["--recompute-granularity", "full", "--recompute-method", "uniform"]]
    )
    layout += pick([[], ["--no-overlap-grad-reduce"]]) + pick([[], ["--ddp-bucket-size", "3000"]])
    layout += ["--num-distributed-optimizer-instances", "2"] if dp > 2 and rng.random() < 0.5 else []
    layout += pick([[], ["--make-vocab-size-divisible-by", "128"]])  # the last of several ranks hold padding only
    experts, shared = draw_experts(rng) if rng.random() < 0.3 else ([], [])
    layout += shared
    model = [
        *draw_model(rng, optimizer),
        *experts,
        *ALL[optimizer].split(),
        *(["--exp-avg-dtype", pick(["fp16", "bf16"])] if "16 bits" in optimizer else []),
        *pick([[], *(r.split() for r in RAMPS)]),
    ]
    # An adapter's gradient has rank 3 and tells little of SOAP's basis of 32: the oracle's own weights move by 5e-4
    # when the learning rate does by one unit in the last place.
    if optimizer != "soap" and rng.random() < 0.15:
        model += ["--lora", "rank=3", "alpha=5", *pick(ADAPTED)]
    if (size == 1 or "--tp-comm-overlap" in layout) and rng.random() < 0.2:
        # scales are those of a micro-batch, and the oracle's have one sample, as a half of two has
        recipes = ["tensorwise", "rowwise", "delayed"]
        model += ["--fp8-format", pick(["e4m3", "hybrid"]), "--fp8-recipe", pick(recipes)]
    delay = int(schedule == "2bw")
    layout += ["--offload", "optimizer"] if rng.random() < 0.1 else []
    if schedule in FLUSH and rng.random() < 0.1:
        delay, layout = 1, [*layout, "--delayed-parameter-update"]
    elif schedule in FLUSH and rng.random() < 0.1:
        layout += ["--offload", "params"]
    if schedule in FLUSH and not delay and rng.random() < 0.15:
        rows = pick([[], ["--offload", "cache_rows=32"]]) + pick([[], ["--offload", "lookahead=0"]])
        layout = [*layout, "--offload", "embedding", *rows]
    if schedule != "pipedream":
        return Layout(tuple(model), tuple(layout), tp * cp * pp * dp, delay=delay)
    model += ["--untie-embeddings-and-output-weights", "--clip-grad", "0"]
    return Layout(tuple(model), tuple(layout), tp * cp * pp * dp, stages=pp, together=size * dp)
