"""A run on one rank, from the configuration to the exit status: the composition root, which knows all rooms.

    config, world -> mesh -> program, stages, optimizer (build.py) -> executor  \
                             data (run_data.py)                    -> batches    +-> Trainer (trainer.py)
                             checkpoint (run_state.py)             -> progress  /
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megalite.checkpoint import Meta
from megalite.comm import ParallelMesh, World, open_channel
from megalite.config import Config
from megalite.convert import Origin
from megalite.data import begun_phases
from megalite.engine import Hyperparameters, SpikeGuard, Updater
from megalite.observe import Record, make_hooks
from megalite.optim import build_scaler
from megalite.parallel.pipeline import Executor, executor_of
from megalite.planner import RankMemory, format_table, within_budget
from megalite.schedule import token_pairs
from megalite.train import matmul_precision
from megalite.train.announcement import announce, make_tracer, open_module
from megalite.train.batch_reader import BatchReader
from megalite.train.build import Model, build_model
from megalite.train.exits import COMPLETED, ExitPolicy
from megalite.train.expert_report import expert_report
from megalite.train.host_embedding import TrafficHook, watch_of
from megalite.train.kept_activations import UnseenGpu
from megalite.train.make_mesh import make_mesh
from megalite.train.matmul_precision import arithmetic_of, set_matmul_precision
from megalite.train.param_schedules import resolve_schedules
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from megalite.train.resume_report import resume_report
from megalite.train.rollback import Rollback
from megalite.train.run_data import RunData, appended_data, changed_data, open_data, resolve_tokenizer
from megalite.train.run_directory import RunDirectory, UploadsHook
from megalite.train.run_state import RunState
from megalite.train.samples import Measures, ModelInUse, SampleWriter
from megalite.train.shared_disks import check_shared_disks
from megalite.train.starting_point import open_start, other_ids
from megalite.train.trainer import Trainer, TrainingProgress
from megalite.train.validation import Validator

logger = logging.getLogger(__name__)


def run_training(config: Config, world: World, measures: Measures | None = None, gpu: UnseenGpu | None = None) -> int:
    """Trains, or with `--skip-train` only evaluates; returns the exit status. gpu: one without values, on which blocks
    say what they keep. Raises MegaliteError."""
    assert measures is not None or not config.logging.eval_tasks.eval_task_files, "nothing measures"
    with ExitStack() as last, open_run(config, world, measures, gpu) as opened:
        trainer = opened.trainer
        if config.training.skip_train:
            return trainer.only_evaluate()
        if trainer.iteration < trainer.train_iters:
            opened.state.check_room(trainer.progress)
        opened.directory.begin(trainer.iteration)
        trainer.unsaved = (local := opened.state.checkpointer.local) is not None and local.is_ahead
        last.enter_context(trainer.exits)  # left after everything else: a second signal must not tear the last save
        status = trainer.train()
        opened.directory.end(trainer.iteration, completed=status == COMPLETED)
    return trainer.exits.exit_status


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready to train: what `open_run` yields."""

    trainer: Trainer
    state: RunState
    directory: RunDirectory
    arithmetic: Record  # what its last bits depend on


@contextmanager
def open_run(
    given: Config, world: World, measures: Measures | None = None, gpu: UnseenGpu | None = None
) -> Iterator[OpenRun]:
    """Builds everything and loads the checkpoint, if there is one; releases the run directory at the end."""
    world.report_phase("start-up: tokenizer")
    resolved, tokenizer = resolve_tokenizer(given)
    plan = within_budget(resolved, world.size, on_cpu=world.device.type == "cpu")
    world.report_phase("start-up: process groups")
    mesh = make_mesh(resolved.parallel, world)
    programs = ProgramCache(resolved, plan)
    programs.prove(world.size, mesh.world)
    program = programs.full(world.size)
    foreign = open_module(resolved, mesh, program, world) if resolved.model.is_foreign else None
    planned = PlannedRun.before(resolved, world.size, program, plan, foreign, on_cpu=world.device.type == "cpu")
    planned = announce(planned, world, mesh.world, gpu)
    world.report_phase("start-up: run directory")
    with RunDirectory(resolved, mesh.world, world.launch, world.host) as directory:
        check_shared_disks(resolved, world, mesh.world)
        start = directory.start()
        tokens = other_ids(start, tokenizer, directory.config, tells=world.is_first)
        settled = resolve_schedules(directory.config, world.size, start)
        config = directory.config = settled.config
        # What the checkpoint says about the run that is continued; nothing where only its weights are taken.
        earlier = start.meta if start is not None and not start.weights_only else {}
        matmul = set_matmul_precision(config, world.device, mesh.world, earlier=earlier.get(matmul_precision.META))
        asked = [Meta(earlier, str(start.path) if start is not None else "").integers("train_requests")]
        world.report_phase("start-up: data (rank 0 tokenises and indexes what is not cached)")
        asked += [phase.requests for phase in begun_phases(earlier)[1:]]
        data = open_data(config, mesh, tokenizer, world, earlier_requests=asked)
        changed = tokens + changed_data(earlier, data.datasets, config)
        world.report_phase("start-up: model")
        model = build_model(config, planned, mesh, world.device)
        scaler, saver, base = build_scaler(config.training), directory.checkpointer, directory.base
        origin = start.origin if start is not None else Origin()
        spikes, guard = config.training.spikes, None
        if spikes.on_spike is not None:  # somebody asks for what looks for spikes of the gradient norm
            most = config.training.loss_scaling.max_skipped_updates
            guard = SpikeGuard(spikes, world.device, max_skipped=most, speaks=world.is_first)
        state = RunState(
            config, model, scaler, tokenizer, data.datasets, saver, settled.schedules, matmul, base, origin, guard
        )
        arithmetic = arithmetic_of(world, mesh.world, matmul)
        progress, facts = TrainingProgress(), arithmetic
        if start is not None:
            world.report_phase(f"start-up: loading {start.path}")
            progress, loaded = state.load(start)
            changed += appended_data(asked, data.datasets)
            rows, record = resume_report(start, settled, world.size, loaded, matmul, changed)
            facts = {**arithmetic, **record}
            if world.is_first:
                logger.info("\n%s", format_table(rows))
        memory = planned.memory if world.is_first else ()  # read there alone
        trainer = assemble_trainer(world, data, programs, state, progress, facts, measures, memory)
        mesh.complete()
        try:
            yield OpenRun(trainer, state, directory, arithmetic)
            model.optimizer.finish_step()  # a delayed step that has failed must not end with the run
        finally:
            model.optimizer.close()


def assemble_trainer(
    world: World, data: RunData, programs: ProgramCache, state: RunState, progress: TrainingProgress,
    start_facts: Record, measures: Measures | None, memory: Sequence[RankMemory] = (),
) -> Trainer:  # fmt: skip
    """Wires executor, updater, batch reader, validator and hooks into a trainer."""
    config, model, mesh = state.config, state.model, data.mesh
    reader = BatchReader(
        data,
        data.train_loader(progress.consumed_samples) if not config.training.skip_train else None,
        model.together,
        # The same on every stage. Some begin a batch of 2BW before the last update: its scale is older.
        lambda batch: updater.loss_scale(previous=model.num_versions > 1 and updater.newest_version() == batch),
        watch_of(data, model.rows, [*model.stages]),
    )
    updater = make_updater(state, reader, progress, late=world.device.type == "cuda")
    executor = make_executor(programs, model, mesh, updater, world)
    saves = config.checkpoint.save is not None
    exits = ExitPolicy(config.training, mesh.world, world.device, state.checkpointer, saves=saves)
    uploads = UploadsHook(state.checkpointer)
    traffic = [] if config.optimizer.offload.embedding_offload is None else [TrafficHook(model.rows)]
    model_in_use = partial(ModelInUse, state, mesh, executor, updater, world.device)
    flops = None if model.foreign is None else model.foreign.flops_per_sample
    return Trainer(
        state=state,
        progress=progress,
        mesh=mesh,
        device=world.device,
        executor=executor,
        updater=updater,
        batch_reader=reader,
        program=programs.program,
        tracer=make_tracer(config, programs.full(world.size), executor, mesh),
        hooks=make_hooks(config, world.rank, start_facts, flops, [*traffic, uploads], memory, executor),
        exits=exits,
        experts=expert_report(config, model, mesh, world.device) if config.model.experts.num_experts else None,
        sample=SampleWriter(model_in_use()) if config.logging.samples.sample_interval is not None else None,
        measure=measures and measures(model_in_use()),
        evaluate=Validator(data, model, executor, updater, progress, exits),
        roll_back=make_rollback(world, data, state, progress, updater, reader),
        report_phase=world.report_phase,
    )


def make_executor(programs: ProgramCache, model: Model, mesh: ParallelMesh, updater: Updater, world: World) -> Executor:
    """The executor of this rank; messages go down and up the pipeline by communicators of their own."""
    config, check = programs.config, programs.config.parallel.check_pipeline_messages
    log = config.logging
    generates = log.samples.sample_interval is not None or bool(log.eval_tasks.eval_task_files)
    # Neighbours send to each other, and where tokens are generated the ends.
    pairs = model.placement.neighbours | (token_pairs(model.placement) if generates else set())
    channel = open_channel(mesh, pairs, split=config.parallel.sequence_parallel, headers=check)
    given = mesh, model.stages, model.placement, channel, updater
    clock = torch.cuda.synchronize if world.device.type == "cuda" else None
    return executor_of(programs.full(world.size), *given, synchronize=clock)


def make_updater(state: RunState, reader: BatchReader, progress: TrainingProgress, *, late: bool) -> Updater:
    """The updater, whose learning rate and weight decay come from their schedules."""
    config, model, schedules = state.config, state.model, state.schedules
    together = model.together
    update_of = reader.number_of if together is None else (lambda microbatch: microbatch // together)

    def policy(update: int) -> Hyperparameters:
        batch = reader.batch(update if together is None else reader.number_of(update * together))
        seen = progress.schedule_samples
        rate, decay = schedules.learning_rate(seen), schedules.weight_decay(seen)
        completes = together is None or (update + 1) * together == batch.first + len(batch.microbatches)
        samples = batch.samples if completes else 0
        clip, own = config.optimizer.clip_grad, None if schedules.decoupled is None else schedules.decoupled(seen)
        return Hyperparameters(rate, decay, clip, batch.loss_scale, progress.iteration + 1, samples, own)

    return Updater(
        model,
        policy=policy,
        count_iteration=progress.count_iteration,
        scaler=state.scaler,
        nonfinite=config.training.nonfinite,
        max_skipped=config.training.loss_scaling.max_skipped_updates,
        version=state.version(progress),
        update_of=update_of,
        late=late,
        spikes=state.spikes,
    )


def make_rollback(
    world: World, data: RunData, state: RunState, progress: TrainingProgress, updater: Updater, reader: BatchReader
) -> Rollback | None:
    """What goes back to a checkpoint after a spike, if it is asked for."""
    model, guard = state.model, state.spikes
    if guard is None or guard.settings.on_spike != "rollback":
        return None

    def load(path: Path) -> tuple[int, int]:
        model.optimizer.finish_step()
        model.optimizer.wait_for_weights()
        own = replace(state.config, checkpoint=replace(state.config.checkpoint, finetune=False))
        loaded, _ = state.load(open_start(path, own, world.size), own=True)
        vars(progress).update(vars(loaded))
        updater.restart(state.version(progress))
        reader.restart(data.train_loader(progress.consumed_samples))
        return progress.iteration, progress.consumed_samples

    return Rollback(guard, state.config.batch_size_schedule(world.size), model.passed, state.checkpointer.go_back, load)
