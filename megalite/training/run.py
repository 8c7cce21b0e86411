"""A run on one rank, from the configuration to the exit status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megalite.comm.mesh import ParallelMesh
from megalite.comm.p2p import TorchChannel
from megalite.comm.shared_memory import share_axis
from megalite.comm.world import World
from megalite.config import Config
from megalite.optim import LearningRateSchedule, LossScaler, WeightDecaySchedule
from megalite.parallel.pipeline.executor import Executor
from megalite.training.build import Model, Schedules, build_model, build_scaler, stage_cuts, wide_dtype
from megalite.training.dataflow import DataFlow, open_data, resolve_tokenizer
from megalite.training.directory import RunDirectory
from megalite.training.exits import COMPLETED, ExitPolicy
from megalite.training.feed import Feed
from megalite.training.matmul import set_matmul_precision
from megalite.training.observers import make_hooks
from megalite.training.pipeline_trace import PipelineTracer
from megalite.training.startup import format_table, start_up_table
from megalite.training.state import RunState
from megalite.training.stats import Record
from megalite.training.trainer import Parts, Progress, Trainer
from megalite.training.update import Hyperparameters, Updater
from megalite.training.validation import Validator

logger = logging.getLogger(__name__)


def run(config: Config, world: World) -> int:
    """Trains (or only evaluates) as the configuration says. Raises MegaliteError. Returns the exit status."""
    with open_run(config, world) as opened:
        trainer = opened.trainer
        if config.training.skip_train:
            return trainer.only_evaluate()
        opened.directory.begin(trainer.iteration)
        status = trainer.train()
        opened.directory.end(trainer.iteration, completed=status == COMPLETED)
    return 0


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready to train: what `open_run` gives."""

    trainer: Trainer
    state: RunState
    directory: RunDirectory


@contextmanager
def open_run(config: Config, world: World) -> Iterator[OpenRun]:
    """Builds everything, loads what is to be loaded; at the end the run directory is given back."""
    config, tokenizer = resolve_tokenizer(config)
    parallel = config.parallel
    mesh = ParallelMesh.build(
        rank=world.rank,
        size=world.size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        dp_replicate=parallel.num_distributed_optimizer_instances,
    )
    if world.device.type == "cpu":
        mesh = replace(mesh, tp=share_axis(mesh.tp, timeout=60 * parallel.distributed_timeout_minutes))
    set_matmul_precision(config, world.device, mesh.world)
    schedules = Schedules(config, mesh.pp.size)
    program = schedules.full(world.size)
    cuts = stage_cuts(config, program)
    if world.is_first:
        table = start_up_table(config, world.size, program=program, cuts=cuts, device=describe_device(world.device))
        logger.info("\n%s", format_table(table))
    with RunDirectory(config, mesh.world) as directory:
        start, meta = directory.start()
        config = directory.config
        began_with = () if config.checkpoint.finetune else tuple(meta.get("train_requests", ()))
        data = open_data(config, mesh, tokenizer, world.device, began_with=began_with)
        model = build_model(config, mesh, program, cuts, world.device)
        scaler = build_scaler(config)
        state = RunState(config, model, scaler, tokenizer, data.datasets.train_requests, directory.checkpointer)
        progress = state.load(start, meta) if start is not None else Progress()
        trainer = assemble(config, world, mesh, data, schedules, model, scaler, state, progress)
        yield OpenRun(trainer, state, directory)


def describe_device(device: torch.device) -> str:
    """Name of a GPU, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def assemble(
    config: Config,
    world: World,
    mesh: ParallelMesh,
    data: DataFlow,
    schedules: Schedules,
    model: Model,
    scaler: LossScaler,
    state: RunState,
    progress: Progress,
) -> Trainer:
    """Wires executor, updater, feed, evaluation and hooks into a trainer."""
    feed = Feed(
        data.train_loader(progress.consumed_samples) if not config.training.skip_train else None,
        dp=mesh.dp,
        per_token=config.training.calculate_per_token_loss,
        device=world.device,
        loss_dtype=wide_dtype(config),
        loss_scale=lambda: scaler.scale,
    )
    updater = make_updater(config, world, model, scaler, feed, progress)
    channel = TorchChannel(mesh.pp_down, mesh.pp_up, headers=config.parallel.check_pipeline_messages)
    synchronize = torch.cuda.synchronize if world.device.type == "cuda" else None
    executor = Executor(mesh.pp.rank, model.stages, model.placement, channel, updater, synchronize=synchronize)
    train_iters = config.train_iterations(world.size)
    traced = config.logging.trace_pipeline
    parts = Parts(
        config=config,
        mesh=mesh,
        device=world.device,
        executor=executor,
        updater=updater,
        feed=feed,
        program=schedules.program,
        batch_sizes=config.batch_size_schedule(world.size),
        train_iters=train_iters,
        tracer=PipelineTracer(traced, executor, mesh, train_iters) if traced is not None else None,
        hooks=make_hooks(config, world.rank),
        exits=ExitPolicy(config.training, mesh.world, device=world.device, save_has_failed=state.save_has_failed),
        finish_save=state.checkpointer.wait,
        evaluate=evaluation(config, mesh, data, model, channel, updater, world.device),
        save=state.save if config.checkpoint.save is not None else None,
        report_phase=world.report_phase,
    )
    return Trainer(parts, progress)


def make_updater(
    config: Config, world: World, model: Model, scaler: LossScaler, feed: Feed, progress: Progress
) -> Updater:
    """What REDUCE and STEP do, with the numbers of each update read from the schedules of learning rate and decay."""
    rates, decays = learning_rates(config, world.size), weight_decays(config, world.size)
    update_of = (lambda microbatch: microbatch) if model.update_per_microbatch else feed.number_of

    def policy(update: int) -> Hyperparameters:
        batch = feed.batch(feed.number_of(update) if model.update_per_microbatch else update)
        samples = progress.schedule_samples
        return Hyperparameters(rates(samples), decays(samples), batch.loss_scale)

    return Updater(
        model.buffers,
        model.optimizer,
        policy=policy,
        scaler=scaler,
        shared=model.shared,
        clip_grad=config.optimizer.clip_grad,
        nonfinite=config.training.nonfinite,
        num_slots=model.num_slots,
        version=progress.microbatches if model.update_per_microbatch else progress.updates,
        update_of=update_of,
        norm_is_global=not model.update_per_microbatch,
    )


def evaluation(
    config: Config,
    mesh: ParallelMesh,
    data: DataFlow,
    model: Model,
    channel: TorchChannel,
    updater: Updater,
    device: torch.device,
) -> Callable[[int, bool], list[Record]]:
    """(iteration, final) -> records of the validation split, at the end also of the test split."""
    validator = Validator(
        model.stages,
        model.placement,
        channel,
        mesh,
        device=device,
        newest_version=updater.newest_version,
        token_bytes=data.token_bytes(),
    )

    def evaluate(iteration: int, final: bool) -> list[Record]:
        splits = {"valid": data.datasets.valid, "test": data.datasets.test if final else None}
        return [
            validator.evaluate(kind, iteration, data.evaluation(dataset))
            for kind, dataset in splits.items()
            if dataset is not None and config.training.eval_iters > 0
        ]

    return evaluate


def learning_rates(config: Config, world_size: int) -> LearningRateSchedule:
    """The learning rate by samples; lengths in iterations are counted in full global batches."""
    settings, sizes = config.optimizer, config.batch_size_schedule(world_size)
    total = sizes.samples_after(config.train_iterations(world_size))
    decay = settings.lr_decay_samples or (settings.lr_decay_iters or 0) * sizes.final or total
    warmup = settings.lr_warmup_samples or settings.lr_warmup_iters * sizes.final
    if settings.lr_warmup_fraction is not None:
        warmup = int(settings.lr_warmup_fraction * decay)
    return LearningRateSchedule(
        lr=settings.lr,
        min_lr=settings.min_lr,
        style=settings.lr_decay_style,  # type: ignore[arg-type]
        decay_samples=decay,
        warmup_samples=warmup,
        warmup_init=settings.lr_warmup_init,
        wsd_style=settings.lr_wsd_decay_style,  # type: ignore[arg-type]
        wsd_decay_samples=settings.lr_wsd_decay_samples or (settings.lr_wsd_decay_iters or 0) * sizes.final,
    )


def weight_decays(config: Config, world_size: int) -> WeightDecaySchedule:
    """Weight decay by samples, ramped over the whole training."""
    settings, sizes = config.optimizer, config.batch_size_schedule(world_size)
    start = settings.weight_decay if settings.start_weight_decay is None else settings.start_weight_decay
    end = settings.weight_decay if settings.end_weight_decay is None else settings.end_weight_decay
    return WeightDecaySchedule(
        start=start,
        end=end,
        style=settings.weight_decay_incr_style,  # type: ignore[arg-type]
        ramp_samples=sizes.samples_after(config.train_iterations(world_size)),
    )
