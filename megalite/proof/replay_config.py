"""The configuration of a replay: the run's own at the iteration, writing nothing, and what may not differ from it."""

from dataclasses import replace
from pathlib import Path

from megalite.config import Config, has_delay, parse, read_unjudged
from megalite.errors import ConfigError
from megalite.launch import LaunchEnvironment
from megalite.proof.history import CONFIG, History, Past
from megalite.schedule import find_schedule
from megalite.train import changes


def again(run: str, iteration: int, flags: list[str], place: LaunchEnvironment) -> tuple[Config, Past]:
    """The configuration that the run had at the iteration, as it is to be replayed, and what is known of the run."""
    if not (Path(run) / CONFIG).is_file():
        raise ConfigError(f"--load={run}: no {CONFIG} in it; give the directory that a run was saved to (--save)")
    history = History.read(Path(run), iteration)
    alone = ["--nprocs", "1"] if place.launcher else []
    as_it_was = ["--config", str(history.config_file())]
    was, argv = read_unjudged(as_it_was)[0], [*as_it_was, *alone, *flags]
    if was.model.is_foreign:
        raise ConfigError(f"--load={run}: a run of --model-module; only those of megalite's own models are replayed")
    if was.logging.profiling.profile:  # of ranks that there may not be now, and it has been written
        argv[len(as_it_was) : len(as_it_was)] = ["--no-profile", "--profile-ranks", "0"]
    _same_updates(was, read_unjudged(argv)[0])  # before the rules, which know nothing of the run, judge the flags
    config = parse(argv, world_size=place.size if place.launcher else None)
    world_size = place.size if place.launcher else (config.parallel.nprocs or 1)
    ranks = was.parallel.nprocs or history.ranks()
    if ranks is not None:  # a run from a launcher that has saved and logged nothing does not say how many it had
        _same_samples(was, ranks, config, world_size)
    total = config.train_iterations(world_size)
    if iteration > total:
        raise ConfigError(f"--iteration={iteration}: the run has {total} iterations (--train-iters)")
    other_data = config.checkpoint.allow_data_change and not was.checkpoint.allow_data_change
    otherwise = changes(was, ranks or world_size, config, world_size)
    config = _reading_only(config, history, other_data, place)
    if history.before is not None:
        config = _with_schedules(was, config, history)
    return config, history.past(other_data, otherwise)


def _reading_only(config: Config, history: History, other_data: bool, place: LaunchEnvironment) -> Config:
    """A run that writes nothing and begins with the checkpoint before the iteration, as the run's own process did."""
    settings, run = replace(config.checkpoint, save=None, auto_resume=False, async_save=False), history.run.resolve()
    if history.before is not None:
        # what a process was told of the checkpoint that it began with does not hold of those that it saved
        began = any(leg.begin == history.begin for leg in history.legs)
        settings = replace(
            settings,
            load=str(history.run),
            ckpt_step=history.begin,
            finetune=False,
            load_optim=settings.load_optim or not began,
            allow_data_change=other_data or (settings.allow_data_change and began),
        )
    elif settings.load is not None and run in (Path(settings.load).resolve(), Path(settings.load).resolve().parent):
        settings = replace(settings, load=None, ckpt_step=None)  # the first process found nothing there yet
    parallel = replace(config.parallel, nprocs=None) if place.launcher else config.parallel
    training = replace(config.training, eval_iters=0, skip_train=False, exit_interval=None)
    return replace(config, parallel=parallel, training=training, checkpoint=settings)


def _with_schedules(was: Config, config: Config, history: History) -> Config:
    """Learning rate and weight decay as in the process that computed the iteration, which may have begun with the
    checkpoint and other flags; where flags are the user's, the schedules' own rules judge."""
    settings = config.checkpoint.schedules
    if settings.override_opt_param_scheduler or settings.use_checkpoint_opt_param_scheduler:
        return config
    if not history.keeps_schedules():
        settings = replace(settings, override_opt_param_scheduler=True)
    elif config.optimizer == was.optimizer:
        settings = replace(settings, use_checkpoint_opt_param_scheduler=True)
    return replace(config, checkpoint=replace(config.checkpoint, schedules=settings))


def _same_updates(was: Config, now: Config) -> None:
    """Raises ConfigError where gradients would be of other weights than in the run, however right the layout is."""
    before, after = was.parallel, now.parallel
    one, other = find_schedule(before.schedule), find_schedule(after.schedule)
    if (one.asynchronous, one.update_per_microbatch) != (other.asynchronous, other.update_per_microbatch):
        raise ConfigError(
            f"--pipeline-schedule={after.schedule}: updates by other rules than the run's {before.schedule}; "
            f"give --pipeline-schedule {before.schedule}"
        )
    if one.update_per_microbatch and before.pipeline_model_parallel_size != after.pipeline_model_parallel_size:
        raise ConfigError(
            f"--pipeline-model-parallel-size={after.pipeline_model_parallel_size}: the run had "
            f"{before.pipeline_model_parallel_size}, and {before.schedule}'s delay is the number of stages; "
            f"give --pipeline-model-parallel-size {before.pipeline_model_parallel_size}"
        )
    if was.optimizer.offload.delayed_parameter_update != now.optimizer.offload.delayed_parameter_update:
        flag = "--delayed-parameter-update"
        had, typed = (
            ("with", f"--no-{flag[2:]}") if was.optimizer.offload.delayed_parameter_update else ("without", flag)
        )
        raise ConfigError(f"{typed}: the run was {had} {flag}, which decides of which weights gradients are; drop it")
    if has_delay(was):
        _same_correction(was, now)


def _same_correction(was: Config, now: Config) -> None:
    flushed = was.parallel.pipeline_flush_steps
    if flushed != now.parallel.pipeline_flush_steps:
        raise ConfigError(
            f"--pipeline-flush-steps={now.parallel.pipeline_flush_steps}: the run had {flushed}, and its other "
            f"iterations have a delay; give --pipeline-flush-steps {flushed}"
        )
    before, after = was.staleness, now.staleness
    if before.method != after.method:
        raise ConfigError(
            f"--staleness-correction={after.method}: gradients would be of other weights than in the run, which had "
            f"{before.method}; give --staleness-correction {before.method}"
        )
    if before.lookahead != after.lookahead:
        then, here = (" ".join(dict.fromkeys(f"{steps:g}" for steps in one.lookahead)) for one in (before, after))
        raise ConfigError(
            f"--staleness-lookahead={here}: gradients would be of other weights than in the run, which had {then}; "
            f"give --staleness-lookahead {then}"
        )


def _same_samples(was: Config, ranks: int, now: Config, world_size: int) -> None:
    """Raises ConfigError where an update would be made of another number of samples than in the run."""
    before, after = was.global_batch_size(ranks), now.global_batch_size(world_size)
    if before != after:
        raise ConfigError(
            f"--global-batch-size={after}: the run's batches had {before} samples; give --global-batch-size {before}"
        )
    if not find_schedule(was.parallel.schedule).update_per_microbatch:
        return
    before = was.training.micro_batch_size * was.microbatches_together(ranks)
    replicas = now.microbatches_together(world_size)
    after = now.training.micro_batch_size * replicas
    if before != after:
        many = "replica" if replicas == 1 else "replicas"
        raise ConfigError(
            f"--micro-batch-size={now.training.micro_batch_size} on {replicas} {many}: an update of "
            f"{after} samples, the run's {was.parallel.schedule} made one of every {before}; "
            "change the two so that their product is that number"
        )
