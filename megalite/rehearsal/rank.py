"""One rank of a run on a device of bookkeeping: the real start, steps and evaluation, without values.

Nothing is read from disk, and nothing is written: data are drawn, and their tokenizer has numbers for words.
"""

import importlib
import io
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from megalite.comm import World, all_gather_json
from megalite.config import VOCABULARIES, Config, DataConfig, config_problems, read_unjudged
from megalite.errors import ConfigError
from megalite.rehearsal.device import aside, watched_gpu
from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.order import shown
from megalite.rehearsal.pieces import Piece, pieces_of
from megalite.rehearsal.record import Communicators, RankRecord
from megalite.rehearsal.short import WHOLE, once_for_all_ranks, shortened, shortest
from megalite.rehearsal.stand_ins import compiled_attention, compiled_blocks, fused
from megalite.rehearsal.streams import DEVICE, Gpu
from megalite.train import open_run

OWN_VOCABULARY = 32000
UNTIL_CAPTURED = 3
"""Iterations of which the last one captures no graph any more."""
A_NODE = 8
PATIENT = 1e6
A_FEW, MOST_PROMPTS = 3, 64
"""Tokens of a continuation; prompts, of which each replica has as many."""


@dataclass
class Rehearsed:
    """What is rehearsed. config: without data, tokenizer and checkpoint, with a short batch; full: with the whole one.
    steps: iterations. known, worked_out: what the ranks of a rehearsal share. prices: what work takes."""

    config: Config
    size: int
    steps: int
    full: Config
    known: Communicators = field(default_factory=Communicators)
    worked_out: dict[Any, Any] = field(default_factory=dict)
    prices: Any = None


def rehearsed(argv: Sequence[str], size: int, *, steps: int = 2) -> Rehearsed:
    """Flags and files of a run, as they are rehearsed on `size` ranks. Raises ConfigError."""
    config, _ = read_unjudged(argv)
    data = config.data
    vocabulary = config.model.vocab_size or VOCABULARIES.get(data.tokenizer_type or "", OWN_VOCABULARY)
    kept = {name: getattr(data, name) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
    hardware = replace(config.parallel.hardware, ignore_memory_estimate=True)
    config = replace(
        config,
        model=replace(config.model, vocab_size=vocabulary),
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", num_workers=0, **kept),
        parallel=replace(config.parallel, nprocs=None, check_pipeline_messages=False, hardware=hardware),
    )
    if problems := config_problems(config, size):
        raise ConfigError(problems)
    if config.parallel.hardware.cuda_graph_impl != "none":
        steps = max(steps, UNTIL_CAPTURED)
    full = _few_steps(config, size, steps)
    return Rehearsed(shortest(full, size), size, steps, full)


def _few_steps(config: Config, size: int, steps: int) -> Config:
    """A run of a few full batches."""
    training, samples = config.training, config.logging.samples
    each = None if config.parallel.experts.expert_model_parallel_size > 1 else samples.sample_interval and steps
    samples = replace(samples, sample_interval=each, sample_prompts="prompts" if each else None, sample_tokens=A_FEW)
    length = replace(training.length, train_iters=steps, train_samples=None, train_tokens=None)
    training = replace(
        training, global_batch_size=config.global_batch_size(size), batch_ramp=type(training.batch_ramp)(),
        length=length, eval_interval=None, eval_iters=int(training.evaluates), full_validation=False,
        exit_interval=None, compile=False,
    )  # fmt: skip
    told = replace(config.logging, log_interval=2, samples=samples)
    return replace(config, training=training, checkpoint=type(config.checkpoint)(), logging=told)


def and_the_first(ranks: Sequence[int], size: int) -> list[int]:
    """Rank 0 and these. Raises ConfigError for one that is not there."""
    if wrong := [rank for rank in (size - 1, *ranks) if not 0 <= rank < size]:
        raise ConfigError(f"rank {wrong[0]}: there are ranks 0 to {size - 1}; name some of these")
    return list(dict.fromkeys([0, *ranks]))


def rehearse_rank(run: Rehearsed, rank: int) -> RankRecord:
    """Everything that a rank of a run does, up to where it fails."""

    def trains(gpu: Gpu, world: World) -> list[Piece]:
        with open_run(run.config, world) as opened:
            for (name, apart), axis in opened.trainer.mesh._axes.items():
                if axis.group is not None:
                    axis.group.name = axis.group.name or (f"{name} {apart}" if apart else name)
            programs = opened.trainer.program
            graphs = run.config.parallel.hardware.cuda_graph_impl != "none"
            if run.full.num_microbatches(run.size) > WHOLE and not graphs:  # which are made for all in flight
                opened.trainer.program = cache(lambda count, iteration: shortened(programs(count, iteration)))
            opened.trainer.executor.mark = gpu.calls.mark
            opened.trainer.train()
            return pieces_of(opened)

    with once_for_all_ranks(run.worked_out):
        return record_rank(trains, rank, run.size, run.known, run.prices)


def record_rank(
    body: Callable[[Gpu, World], Sequence[Piece]], rank: int, size: int, known: Communicators, prices: Any = None
) -> RankRecord:
    """What `body` does as a rank of `size`. Returns what it would save, too."""
    groups = FakeGroups(rank, size, known)
    with alone(groups) as gpu:
        host, inside = f"node{rank // A_NODE}", min(A_NODE, size)
        world = World(rank, size, DEVICE, rank % A_NODE, inside, host=host, report_phase=gpu.calls.enter)
        gpu.ledger.prices = prices
        record = RankRecord(rank, gpu.calls, gpu.ledger.log, made=groups.made)
        try:
            record.pieces = body(gpu, world)
        except ConfigError:  # no rank would start
            raise
        except Exception as error:  # whatever the product or torch raises is what the rank comes to
            said = str(error).partition("\n")[0]
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f"{name}:{frame.lineno}" for frame in frames if (name := shown(frame.filename))]
            at = lines[-1] if lines else "no line of the product"
            record.problem = f"{type(error).__name__}: {said} (at {at})"
        # What the last iteration has started, the next one would wait for.
        last = next((e[4] for e in reversed(record.log) if e[0] == "phase" and e[4].startswith("iteration")), "")
        record.unwaited = [work.call for work in gpu.unwaited.values() if work.call.phase != last]
        record.races, record.launches = gpu.races, gpu.ledger.launches
        record.lines = [line.name for line in gpu.ledger.lines]
        return record


def unseen(size: int) -> AbstractContextManager[Gpu]:
    """The first of so many ranks, on a GPU without values: what is made there can be measured."""
    return alone(FakeGroups(0, size))


@contextmanager
def alone(groups: FakeGroups) -> Iterator[Gpu]:
    """A rank without others, whose weights are not drawn."""
    with ExitStack() as stack:
        kernels = importlib.import_module("megalite.nn.attention.choose").KERNELS
        continued: dict[str, list[int]] = {str(place): [] for place in range(MOST_PROMPTS)}
        for module, name, value in (
            (
                "megalite.train.announcement",
                "as_read",
                lambda run, *_: run,
            ),  # the rank itself says what it holds and keeps
            ("megalite.train.build", "fill", lambda name, parameter, *, seed: parameter.data.zero_()),
            ("megalite.train.samples", "read_prompts", lambda *_: ["1 2 3"] * min(groups.world.size(), MOST_PROMPTS)),
            # other replicas have continued their prompts, too
            ("megalite.generation.engine", "all_gather_json", lambda *mine: [continued, *all_gather_json(*mine)]),
            ("megalite.comm.patience", "VOTE_SECONDS", PATIENT),
            # what is tried on a device of this machine is taken to work on that one
            ("megalite.nn.attention.choose", "KERNELS", tuple(kernel._replace(works=None) for kernel in kernels)),
            ("megalite.parallel.expert.grouped", "grouped_works", lambda device: True),
            ("megalite.parallel.tensor.float8", "_worst_difference", lambda given, device: 0.0),
            ("megalite.nn.attention.masked", "flex", lambda: (compiled_attention, compiled_blocks)),
            ("megalite.nn.attention.masked", "compiled", fused),
        ):
            stack.enter_context(patch.object(importlib.import_module(module), name, value))
        stack.enter_context(redirect_stdout(io.StringIO()))
        logger = logging.getLogger("megalite")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # parameters that move stay the objects they are
        gpu = stack.enter_context(watched_gpu(groups))
        layers = importlib.import_module("megalite.library.traced_layer")
        stack.enter_context(patch.object(layers, "trace", aside(gpu, layers.trace, true_device=True)))
        yield gpu
