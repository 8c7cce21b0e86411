"""The logging section: console, metrics.jsonl, trackers, profiler."""

from megalite.config.schema import Section, Spelled, option


class WandB(Spelled, flag="wandb", needs="wandb_project"):
    """Weights & Biases"""

    wandb_project: str | None = option(None, "log to this Weights & Biases project (offline without a key)")
    wandb_exp_name: str | None = option(None, "name of the run there; unset: the name of `save`")
    wandb_entity: str | None = option(None, "account or team there")
    wandb_save_dir: str | None = option(None, "folder of its local files; unset: `save`", metavar="DIR")


class Profiling(Spelled, flag="profile", only_with="profile"):
    """write a Chrome trace of some iterations with torch's profiler"""

    profile: bool = option(False, "write a Chrome trace of some iterations with torch's profiler", switch="profile")
    profile_step_start: int = option(10, "first iteration profiled", ge=0)
    profile_step_end: int = option(12, "iteration before which the profile ends", ge=1)
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are profiled", metavar="RANK", ge=0)


class Samples(Spelled, flag="sample"):
    """texts that the model writes during the training"""

    sample_prompts: str | None = option(
        None, "JSONL file with a field 'prompt', or a prompt in each line", metavar="FILE", needs="sample_interval"
    )
    sample_interval: int | None = option(
        None,
        "iterations between continuations of the prompts, in the log and in samples.jsonl",
        ge=1,
        needs="sample_prompts",
    )
    sample_tokens: int = option(64, "new tokens of each", ge=1, only_with="sample_interval")


class EvalTasks(Spelled, flag="eval_tasks", needs="eval_task_files"):
    """tasks of lm-evaluation-harness that measure the model during the training"""

    eval_task_files: tuple[str, ...] = option(
        (), "task files (YAML) of lm-evaluation-harness that the model is measured by", metavar="FILE", arg="files"
    )
    eval_tasks_interval: int | None = option(None, "iterations between two times; unset: only at the end", ge=1)
    eval_tasks_limit: int | None = option(None, "questions of each task; unset: all", ge=1)


class Prometheus(Spelled, flag="prometheus"):
    """the newest numbers of the run in Prometheus' format"""

    prometheus_port: int | None = option(None, "port of the loopback device that serves them", ge=1, le=65535)
    prometheus_file: str | None = option(
        None, "metrics.prom, written anew after each log line, for node_exporter's textfile collector", metavar="FILE"
    )


class LoggingConfig(Section):
    """Trackers are optional packages and never stop a training."""

    log_interval: int = option(10, "iterations between log lines", ge=1)
    tensorboard_dir: str | None = option(None, "write TensorBoard events here", metavar="DIR")
    wandb: WandB = WandB()
    profiling: Profiling = Profiling()
    samples: Samples = Samples()
    eval_tasks: EvalTasks = EvalTasks()
    prometheus: Prometheus = Prometheus()
    on_event: str | None = option(
        None,
        "command that is told of start, saves, spikes, rollbacks, slow and lost ranks and the end, as JSON on its "
        "standard input",
        metavar="COMMAND",
    )
    trace_pipeline: str | None = option(
        None,
        "write the measured pipeline timeline of the last iteration (of asynchronous schedules: the last four) here "
        "(.html, .svg, .json, .txt)",
        metavar="FILE",
    )
