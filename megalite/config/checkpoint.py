"""The checkpoint section: what is saved, when, and what a run starts from."""

from megalite.config.schema import OneOf, Section, Spelled, option
from megalite.files import served_url, staging_folder


class WhoseSchedules(OneOf, saved=False):
    """Which schedules hold where those of --load are not those of the flags."""

    override_opt_param_scheduler: bool = option(False, "take those of the flags")
    use_checkpoint_opt_param_scheduler: bool = option(False, "take those of `load`")


class LocalSaveConfig(Spelled, only_with="non_persistent_save_interval"):
    """Saves on the hosts themselves, between those in `save`."""

    non_persistent_save_interval: int | None = option(
        None,
        "iterations between saves on the hosts themselves; the newest is kept",
        ge=1,
        needs="non_persistent_ckpt_type",
    )
    non_persistent_ckpt_type: str | None = option(
        None,
        "where on the hosts: local: on disk; in_memory: in a file system in memory",
        choices=("local", "in_memory"),
        needs="save",
    )
    non_persistent_local_ckpt_dir: str | None = option(
        None, "folder of each host's own for these saves; unset: /dev/shm/megalite for in_memory", metavar="DIR"
    )
    replication: bool = option(False, "keep each of their files on several hosts")
    replication_jump: int | None = option(
        None,
        "ranks between two that keep the same file; unset: those with the same place on the next hosts",
        ge=1,
        only_with="replication",
    )
    replication_factor: int = option(2, "hosts that keep each file", ge=2, only_with="replication")

    @property
    def folder(self) -> str:
        """Where they are on a host."""
        return self.non_persistent_local_ckpt_dir or "/dev/shm/megalite"

    @property
    def copies(self) -> int:
        """Hosts that are to keep each file."""
        return self.replication_factor if self.replication else 1


class CheckpointConfig(Section):
    """A run directory (`save`) holds config.yaml, metrics.jsonl and checkpoints `iter_0000100/`."""

    save: str | None = option(
        None, "run directory for checkpoints, metrics and configuration, or s3://BUCKET/RUN", metavar="DIR", stores=True
    )
    checkpoint_staging_path: str | None = option(
        None,
        "folder on each host's disk for what waits for its upload to a `save` in a store, and for metrics; unset: in "
        "the user's cache",
        metavar="DIR",
        needs="save",
    )
    save_interval: int | None = option(
        None,
        "iterations between checkpoints; unset: only at the end",
        ge=1,
        hint="leave it out to save only at the end",
        only_with="save",
    )
    async_save: bool = option(
        False, "write checkpoints in the background; the step waits only for the copy", only_with="save"
    )
    keep_last_n: int | None = option(
        None, "keep only the newest n checkpoints; unset: all, or with `save_retain_interval` one", ge=1, needs="save"
    )
    save_retain_interval: int | None = option(
        None,
        "checkpoints at multiples of this iteration stay; older ones than the newest `keep_last_n` are deleted",
        ge=1,
        needs="save",
    )
    local: LocalSaveConfig = LocalSaveConfig()
    load: str | None = option(
        None,
        "directory to resume from; may be `save` itself, which then may still be empty. A Hugging Face model gives its "
        "weights (and its tokenizer, unless one is named)",
        metavar="DIR",
        stores=True,
    )
    trust_pickle: bool = option(
        False,
        "open the pickles of a `load` in torch's distributed format (Megatron-LM's torch_dist, torchtitan's), in a "
        "process that runs nothing of them",
        needs="load",
        saved=False,
    )
    auto_resume: bool = option(
        False, "resume from the newest committed checkpoint of `save`, if there is one", needs="save"
    )
    ckpt_step: int | None = option(None, "iteration to load; unset: the newest committed", ge=0)
    finetune: bool = option(
        False, "take only the weights of `load`; iteration, data and optimizer start anew", needs="load"
    )
    use_checkpoint_args: bool = option(
        False,
        "take the model's architecture and tokenizer from `load`; a flag that contradicts it is an error",
        saved=False,
    )
    schedules: WhoseSchedules = WhoseSchedules()
    allow_data_change: bool = option(
        False, "continue from `load` although the data are no longer those that it was trained on", saved=False
    )
    load_optim: bool = option(True, "load the optimizer state with the weights")
    load_rng: bool = option(True, "continue with the checkpoint's seed, not with `seed`")

    @property
    def kept(self) -> int | None:
        """How many of the newest checkpoints stay; None: all."""
        return 1 if self.keep_last_n is None and self.save_retain_interval is not None else self.keep_last_n

    @property
    def run_folder(self) -> str | None:
        """The folder on this host in which a run writes its files: `save`, or beside a store where uploads wait."""
        if self.save is None or served_url(self.save) is None:
            return self.save
        return self.checkpoint_staging_path or staging_folder(self.save)
