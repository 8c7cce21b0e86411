"""What a run begins with: a checkpoint of any layout, or the weights of a Hugging Face model.

    --load runs/a          weights, optimizer, progress (with --finetune the weights)
    --load models/llama    the weights: logical tensors are read one by one and cut for whatever layout the run has
    --load megatron/run --trust-pickle      torch_dist: the same, with masters, moments and progress

`offer_of` is asked while flags are read, before ranks start; `open_start` on every rank.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint import (
    COMMITTED,
    Checkpointer,
    CheckpointReader,
    Manifest,
    Meta,
    check_tensors,
    committed,
    copy_extras,
    first_problem,
    is_distributed,
    is_huggingface,
    read_extra,
    read_manifest,
    resolve_checkpoint,
    torn_shards,
)
from megalite.comm import Axis, TensorShard, all_gather_json
from megalite.config import Config, ModelConfig, Offer, from_dict
from megalite.convert import (
    BASE_META,
    CONFIG,
    CONTINUED,
    ORIGIN_META,
    BaseModel,
    CheckpointSource,
    DcpSource,
    DcpState,
    HuggingFaceSource,
    MegatronDistSource,
    Origin,
    TrainedRun,
    is_peft,
    open_distributed,
    state_of,
)
from megalite.data import DESCRIPTION_FILE, ByteTokenizer, NullTokenizer, Tokenizer, read_description, same_ids
from megalite.errors import CheckpointError, DataError, MegaliteError
from megalite.files import served_url, staging_folder
from megalite.progress import amount
from megalite.stores import Place, StoreUrl, close_stores, place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """What a run begins with."""

    path: Place  # a committed checkpoint, or a Hugging Face directory
    model: ModelConfig  # what the weights are
    meta: Mapping[str, Any]
    weights_only: bool  # iteration, data and optimizer start anew
    saved: Config | None = None  # of the run that wrote the checkpoint
    told: frozenset[str] | None = None  # the settings that its format holds, where it is not ours
    world_size: int = 1  # of that run
    # Gives the weights of a model in another format; None for a checkpoint.
    source: HuggingFaceSource | MegatronDistSource | DcpSource | None = None
    run: TrainedRun | None = None  # gives the tensors of a run in another format
    kind: str = ""  # that format, for messages

    @property
    def origin(self) -> Origin:
        """The Hugging Face model that the weights were first taken from, if any."""
        return self.source.origin if self.source is not None else Origin.from_meta(self.meta.get(ORIGIN_META))

    @property
    def tensors(self) -> Collection[str]:
        """Names of the tensors of a run."""
        return read_manifest(self.path).tensors if self.run is None else self.run.names


def open_start(path: Place, config: Config, world_size: int) -> StartingPoint:
    """Reads what is there besides the tensors, for a run of this configuration: one with adapters takes the weights of
    a model without them. Of a checkpoint in torch's distributed format, which users have said they trust, flags say the
    step, and where it does not the tokens without padding and the samples."""
    finetune, adapters = config.checkpoint.finetune, config.model.lora.lora_rank is not None
    samples_after = config.batch_size_schedule(world_size).samples_after
    if is_distributed(path):
        found = open_distributed(Path(str(path)), config.checkpoint.ckpt_step, config.model.vocab_size or None)
        if adapters:
            raise CheckpointError(
                f"`load`={path}: adapters need a model whose content they can record; make one of this by "
                "tools/convert_checkpoint.py --to megalite"
            )
        return _distributed_start(path, found, samples_after, weights_only=finetune)
    if isinstance(path, Path) and is_huggingface(path):
        source = HuggingFaceSource(path)
        kind = f"Hugging Face {source.family.name}"
        return StartingPoint(path, source.model, {}, weights_only=True, source=source, kind=kind)
    manifest = read_manifest(path)
    saved = config_of(path, manifest)
    finetune = finetune or (adapters and saved.model.lora.lora_rank is None)
    if CONTINUED in manifest.meta and not finetune:
        start = StartingPoint(path, saved.model, {}, weights_only=False, world_size=manifest.world_size)
        return _as_flags_say(start, manifest.meta, samples_after)
    if not finetune and "progress" not in manifest.meta:
        raise CheckpointError(f"`load`={path}: holds weights and no run (it was converted); add `finetune`")
    return StartingPoint(
        path, saved.model, manifest.meta, weights_only=finetune, saved=saved, world_size=manifest.world_size
    )


def _distributed_start(
    path: Place, source: MegatronDistSource | DcpSource, samples_after: Callable[[int], int], *, weights_only: bool
) -> StartingPoint:
    """A run of Megatron-LM's, or one in torch's distributed format. Raises CheckpointError, ConfigError."""
    kind = "torch.distributed.checkpoint" if isinstance(source, DcpSource) else "Megatron-LM's torch_dist"
    start = StartingPoint(path, source.model, {}, weights_only=True, source=source, kind=kind)
    if weights_only or (run := state_of(source)) is None:
        return start
    if isinstance(run, DcpState):
        return replace(_as_flags_say(start, run.meta, samples_after), run=run)
    return replace(start, meta=run.meta, weights_only=False, saved=run.config, told=run.told, run=run)


def _as_flags_say(start: StartingPoint, meta: Mapping[str, Any], samples_after: Callable[[int], int]) -> StartingPoint:
    """A run of which no more is known than `DcpState.meta` says."""
    said = Meta(meta, str(start.path)).section(CONTINUED)
    done, steps = said.integer("iteration"), said.integer("steps")
    samples = samples_after(done) if said.raw.get("samples") is None else said.integer("samples")
    progress = {
        "iteration": done, "consumed_samples": samples, "updates": done, "microbatches": done,
        "skipped_iterations": done - steps, "schedule_samples": samples * steps // max(1, done),
    }  # fmt: skip
    logger.warning(
        "`load`=%s: iteration %s; the schedules are those of the flags, the data go on as after %s samples of theirs",
        start.path, f"{done:,}", f"{samples:,}",
    )  # fmt: skip
    return replace(start, meta={**meta, "progress": progress, "loss_scaler": {}}, weights_only=False)


def other_ids(start: StartingPoint | None, tokenizer: Tokenizer, config: Config, *, tells: bool = True) -> list[str]:
    """How the run's tokenizer differs from that of the model which it begins with, as the report says it.

    tells: whether this rank logs a line where a Hugging Face model, or weights alone, come with a tokenizer that gives
    a text other ids.
    Raises DataError where a run would continue with them, unless `--allow-data-change` is set.
    """
    known = None if start is None else _tokenizer_of(start, tokenizer)
    if start is None or known is None or NullTokenizer.kind in (known.kind, tokenizer.kind):
        return []
    if same_ids(known, tokenizer):
        return []
    if start.weights_only or config.training.skip_train:
        fix = f"`tokenizer_model` {start.path} takes the model's own"
        if start.source is not None:
            fix = "leave out `tokenizer_type` and `tokenizer_model` to train with the model's own"
        if tells:
            logger.warning(
                "`load`=%s: its own tokenizer gives a text other ids than the one of this run (%s); %s",
                start.path, tokenizer.describe(), fix,
            )  # fmt: skip
        return []
    if not config.checkpoint.allow_data_change:
        given = config.data.tokenizer_model
        flag = f"`tokenizer_type`={tokenizer.kind}" if given is None else f"`tokenizer_model`={given}"
        raise DataError(
            f"{flag}: another tokenizer than the checkpoint's: gives a text other ids than its model has learnt; "
            f"`tokenizer_model` {start.path} takes the checkpoint's, `allow_data_change` continues with this one"
        )
    return [f"tokenizer: {known.describe()} -> another, {tokenizer.describe()}"]


def _tokenizer_of(start: StartingPoint, ours: Tokenizer) -> Tokenizer | None:
    """That of a Hugging Face model or of a checkpoint; None where there is none, or it is known to be ours."""
    if start.source is not None:
        known = isinstance(start.source, HuggingFaceSource) and not start.source.origin.has_tokens_of(ours)
        return start.source.tokenizer if known else None
    reader = CheckpointReader(start.path)
    return CheckpointSource.tokenizer_of(reader) if DESCRIPTION_FILE in reader.manifest.extra_files else None


def offer_of(
    load: str, ckpt_step: int | None, trust_pickle: bool = False, vocab_size: int | None = None
) -> Offer | None:
    """What `--load` says of the model, for the parser; None where nothing is committed yet. trust_pickle: whether it
    may be in torch's distributed format; vocab_size: its tokens without padding, where given. Raises MegaliteError."""
    try:
        if is_distributed(load) and trust_pickle:
            found = open_distributed(Path(load), ckpt_step, vocab_size)
            kind = found.tokenizer.kind
            tokenizer = {} if kind == NullTokenizer.kind else _tokenizer_flags(kind, found.home)
            return Offer(str(found.directory), found.model, tokenizer)
        return _offer_of(place(load), ckpt_step)
    finally:
        close_stores()  # ranks may be forked from this process


def _offer_of(root: Place, ckpt_step: int | None) -> Offer | None:
    if isinstance(root, Path) and is_huggingface(root):
        source = HuggingFaceSource(root)
        return Offer(f"{root / CONFIG}", source.model, _tokenizer_flags(source.tokenizer.kind, root), huggingface=True)
    if isinstance(root, Path) and is_peft(root):
        raise CheckpointError(
            f"`load`={root}: adapters of peft, no model; name the run that trained them, or a model that they are "
            "merged into (merge_and_unload of peft)"
        )
    other = is_distributed(root) or torn_shards(root) or (isinstance(root, Path) and os.path.isfile(root))
    if not other and ckpt_step is None and not (root / COMMITTED).is_file() and not committed(root):
        return None
    path = resolve_checkpoint(root, ckpt_step)
    manifest = read_manifest(path)
    model, tokenizer = config_of(path, manifest).model, {}
    if DESCRIPTION_FILE in manifest.extra_files:
        kind, _ = read_description(read_extra(path, manifest, DESCRIPTION_FILE), str(path / DESCRIPTION_FILE))
        if isinstance(path, StoreUrl):  # a tokenizer is read from a disk
            folder = Path(staging_folder(str(path)))
            folder.mkdir(parents=True, exist_ok=True)
            copy_extras(path, manifest, folder)
        else:
            folder = path
        tokenizer = _tokenizer_flags(kind, folder)
    return Offer(str(path), model, tokenizer)


def _tokenizer_flags(kind: str, directory: Path) -> dict[str, Any]:
    """The flags that name the tokenizer whose files lie in `directory`."""
    without_files = kind in (ByteTokenizer.kind, NullTokenizer.kind)
    return {"tokenizer_type": kind} | ({} if without_files else {"tokenizer_model": str(directory)})


def config_of(path: Place, manifest: Manifest) -> Config:
    """The configuration of the run that wrote a checkpoint, whose weights it holds. Raises MegaliteError."""
    if not isinstance(manifest.meta.get("config"), dict):
        raise CheckpointError(f"{path}: holds no configuration; was it written by megalite's trainer?")
    config = from_dict(manifest.meta["config"], str(path))
    if not config.model.is_foreign:  # what a module of the user's holds is known once it is made
        check_tensors(config.model, manifest.tensors, str(path))
    return config


def settle_base(config: Config, start: StartingPoint | None, world: Axis) -> BaseModel | None:
    """The frozen model of a run with adapters, found and compared; None for any other run. Collective.

    Raises CheckpointError where it is not there or not the same.
    """
    seed, load = config.training.seed, config.checkpoint.load
    if config.model.lora.lora_rank is None:
        return None
    if start is None:
        return BaseModel(None, seed=seed)
    if start.saved is None or start.saved.model.lora.lora_rank is None:
        if isinstance(start.path, StoreUrl):
            raise CheckpointError(f"`load`={start.path}: adapters need their model on a disk; copy it there")
        return BaseModel.at(start.path, world)
    where = str(start.path)
    recorded = BaseModel.of_meta(start.meta, where)
    if recorded.path is None:
        if recorded.seed != seed:
            raise CheckpointError(f"{where}: adapters of the random weights of `seed`={recorded.seed}; give that")
        return recorded
    return recorded.found(where, world, _base_elsewhere(load, start.path, recorded.path))


def _base_elsewhere(load: str | None, checkpoint: Place, recorded: Path) -> Path | None:
    """Where `--load` says that the model of resumed adapters lies now; None: where they were begun. It may also name
    the run itself, adapters that it was continued from, or a run that has trained its model further since."""
    if load is None or served_url(load) is not None:
        return None
    path, own = Path(load).resolve(), checkpoint.resolve()
    if path in (own, own.parent) or (recorded.is_dir() and path in (recorded, recorded.parent)):
        return None
    if path.is_dir() and not is_huggingface(path) and (path / COMMITTED).is_file() or committed(path):
        return None if BASE_META in read_manifest(resolve_checkpoint(path)).meta else path
    return path


def load_base(base: BaseModel, shards: Sequence[TensorShard], world: Axis) -> None:
    """Fills the shards with the weights of a frozen model, cast to their dtype. Collective. Raises CheckpointError."""
    source = base.open()
    if isinstance(source, HuggingFaceSource):
        load_weights(source.read, source.directory, shards, world)
    elif isinstance(source, CheckpointSource):
        Checkpointer(".", world=world).load(source.path, shards, cast=True)


def load_model(path: Place, use_ema: bool, elsewhere: Path | None, shards: Sequence[TensorShard], world: Axis) -> None:
    """All weights of a checkpoint, adapters and their model included, cast to the shards' dtype. use_ema: averages
    where there are some. elsewhere: where that model lies now. Collective. Raises CheckpointError."""
    manifest = read_manifest(path)
    own = [shard for shard in shards if BASE_META not in manifest.meta or shard.name in manifest.tensors]
    Checkpointer(path.parent, world=world).load(path, own, cast=True)
    if len(own) < len(shards):
        base = BaseModel.of_meta(manifest.meta, str(path)).found(str(path), world, elsewhere)
        load_base(base, [shard for shard in shards if shard.name not in manifest.tensors], world)
    if use_ema:
        reader = CheckpointReader(path, use_ema=True)
        averaged = [shard for shard in own if shard.name in reader.averaged]
        load_weights(reader.read, reader.directory, averaged, world)


def load_weights(read: Callable[[str], Tensor], directory: Place, shards: Sequence[TensorShard], world: Axis) -> None:
    """Fills the shards with what a model or a run in another format has, or with averages, cast to their dtype.
    Collective over `world`. read: name -> the whole tensor, which `directory` has.

    One logical tensor is in memory at a time; a rank reads those of which it holds a part. Raises CheckpointError, on
    all ranks, where one of them cannot read its part.
    """
    started, nbytes, problem = time.perf_counter(), 0, None
    wanted: dict[str, list[TensorShard]] = {}
    for shard in shards:
        wanted.setdefault(shard.name, []).append(shard)
    try:
        for name, places in wanted.items():
            values = read(name)
            nbytes += values.nbytes
            for shard in places:
                inside = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
                shard.local.detach().copy_(values[inside])
    except MegaliteError as error:
        problem = str(error)
    agreed = first_problem(all_gather_json(problem, world))
    if agreed:
        raise CheckpointError(agreed)
    seconds = time.perf_counter() - started
    logger.info("loaded %s (%s on this rank in %.2f s)", directory, amount(nbytes, "B"), seconds)
