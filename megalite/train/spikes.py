"""What looks for spikes of the gradient in a run, and what goes back to a checkpoint after one."""

from __future__ import annotations

from pathlib import Path

from megalite.comm import World
from megalite.config import Config
from megalite.engine import SpikeGuard, Updater
from megalite.train.batch_reader import BatchReader
from megalite.train.rollback import Rollback
from megalite.train.run_data import RunData
from megalite.train.run_state import RunState
from megalite.train.starting_point import open_start
from megalite.train.trainer import TrainingProgress


def make_spike_guard(config: Config, world: World) -> SpikeGuard | None:
    """What looks for spikes of the gradient norm, if somebody asks for it."""
    settings, most = config.training.spikes, config.training.loss_scaling.max_skipped_updates
    if settings.on_spike is None:
        return None
    return SpikeGuard(settings, world.device, max_skipped=most, speaks=world.is_first)


def make_rollback(
    world: World, data: RunData, state: RunState, progress: TrainingProgress, updater: Updater, reader: BatchReader
) -> Rollback | None:
    """What goes back to a checkpoint after a spike, if it is asked for."""
    config, model, guard = state.config, state.model, state.spikes
    if guard is None or config.training.spikes.on_spike != "rollback":
        return None

    def load(path: Path) -> tuple[int, int]:
        model.optimizer.finish_step()
        for buffers in model.families:
            buffers.weights.wait()
        loaded, _ = state.load(open_start(path, finetune=False), own=True)
        vars(progress).update(vars(loaded))
        updater.restart(state.version(progress))
        reader.restart(data.train_loader(progress.consumed_samples))
        return progress.iteration, progress.consumed_samples

    return Rollback(
        config.training.spikes,
        config.batch_size_schedule(world.size),
        model.passed,
        find=state.checkpointer.go_back,
        load=load,
        forget=guard.forget,
        speaks=world.is_first,
    )
