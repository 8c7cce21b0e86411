"""Rules of what a run reads and writes: data, tokenizer, checkpoints, trackers."""

from collections.abc import Iterator

from megalite.config.data import PATHS, VOCABULARIES, WITHOUT_FILE
from megalite.config.root import Config
from megalite.config.rules.text import multiples_around


def data(config: Config, world_size: int) -> Iterator[str]:
    source = config.data
    try:
        source.phases(config.model.seq_length)
    except ValueError as error:
        yield f"`data_schedule`='{source.data_schedule}': {error}; write it like '0:web.txt 4T:anneal.txt'"
    names, paths = source.validation_set_names, source.valid_data_path
    flag = f"`validation_set_names`={' '.join(names)}"
    if names and paths and len(names) != len(paths):
        yield f"{flag}: {len(names)} names for {len(paths)} paths of `valid_data_path` (no weights); give one for each"
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield f"{flag}: {twice} is there twice; give each set a name of its own"
    for path in (path for name in PATHS for path in getattr(source, name)):
        if path.endswith((".bin", ".idx")):
            yield f"`data_path`={path}: give the prefix, '{path[:-4]}'"
    try:
        weights = [float(part) for part in source.split.replace(" ", "").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        yield f"`split`={source.split}: expected up to three weights such as 969,30,1, not all 0"
    kind, size = source.tokenizer_type, config.model.vocab_size
    stand_in = source.stand_in_ids(size)
    known = config.training.dry_run and (size >= 2 or kind in VOCABULARIES)  # then `missing_data` lists what it lacks
    if stand_in is not None:
        if stand_in < 2:
            yield f"`tokenizer_type`={kind}: its file is not given; name it by `tokenizer_model`, or give `vocab_size`"
    elif lacks := source.tokenizer_lacks():
        yield from [] if known else lacks
    elif kind == "NullTokenizer" and size < 2:
        yield f"`vocab_size`={size}: `tokenizer_type`={kind} needs at least 2 ids; give their number"
    for name, without in WITHOUT_FILE.items():
        value = getattr(source, name)
        if value is not None and kind in without:
            yield f"`{name}`={value}: `tokenizer_type`={kind} reads no such file; drop one of them"


def checkpoint(config: Config, world_size: int) -> Iterator[str]:
    settings = config.checkpoint
    interval, retain = settings.save_interval, settings.save_retain_interval
    if retain is not None and interval is not None and retain % interval:
        near = multiples_around(retain, interval)
        yield f"`save_retain_interval`={retain}: not a multiple of `save_interval`={interval}; try {near}"
    if settings.ckpt_step is not None and settings.load is None and not settings.auto_resume:
        yield f"`ckpt_step`={settings.ckpt_step}: needs `load`"
    elif settings.ckpt_step is not None and settings.auto_resume and settings.load not in (None, settings.save):
        yield (
            f"`ckpt_step`={settings.ckpt_step}: of `load`, or of `save` (`auto_resume`)? "
            "let `load` name the step's directory"
        )
    if settings.use_checkpoint_args and settings.load is None and not settings.auto_resume:
        yield "`use_checkpoint_args`: needs `load`"


def local_saves(config: Config, world_size: int) -> Iterator[str]:
    """Saves on the hosts themselves need a folder there, and other ranks for their copies."""
    local = config.checkpoint.local
    if local.non_persistent_ckpt_type == "local" and local.non_persistent_local_ckpt_dir is None:
        yield "`non_persistent_ckpt_type`=local: needs `non_persistent_local_ckpt_dir` DIR, a folder of each host"
    factor, jump, nprocs = local.copies, local.replication_jump, config.parallel.nprocs
    if local.replication and nprocs is not None:
        yield f"`replication`: the {nprocs} ranks of `nprocs` are on one host, which keeps their files anyway; drop it"
        return
    if factor > world_size:
        yield (
            f"`replication_factor`={factor}: there are {world_size} ranks, and each copy is on another host; give "
            f"at most {world_size}, or drop `replication`"
        )
    elif jump is not None and any(jump * n % world_size == 0 for n in range(1, factor)):
        yield (
            f"`replication_jump`={jump}: of {world_size} ranks, {jump} further on is the same one again before "
            f"{factor} hosts have the file; give the number of ranks of a host"
        )


def tracking(config: Config, world_size: int) -> Iterator[str]:
    log = config.logging
    if log.trace_pipeline is not None and not log.trace_pipeline.endswith((".html", ".svg", ".json", ".txt")):
        yield f"`trace_pipeline`={log.trace_pipeline}: unknown form; end the name in .html, .svg, .json or .txt"
    for name, tool in {"sample_interval": "generate_text", "eval_task_files": "evaluate_harness"}.items():
        if name in config.given and config.training.skip_train:
            value = config.given[name]
            first = value[0] if isinstance(value, tuple) else value
            yield f"`{name}`={first}: has no effect with `skip_train`; drop it, and use tools/{tool}.py"
