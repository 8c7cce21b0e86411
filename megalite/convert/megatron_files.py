"""Megatron-LM's `torch` checkpoints on disk: read rank by rank through another process, written file by file.

latest_checkpointed_iteration.txt                 100, or release
iter_0000100/mp_rank_00/model_optim_rng.pt        tensor-parallel rank; of a pipeline mp_rank_00_000, with the stage
    args, checkpoint_version, iteration, model (virtual stages: model0, model1, ...), optimizer, ...
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import TRACKER, directory_name, fsync_directory, read_small
from megalite.config import ModelConfig
from megalite.convert.megatron import (
    COPY,
    CORE,
    EXTRA_STATES,
    IGNORED,
    check_cut,
    megatron_names,
    name_of,
    plain_name,
    read_args,
    rule_of,
    untangle,
    write_args,
)
from megalite.convert.megatron_process import Listing, Unpickler
from megalite.convert.source import ModelSource, Origin, staged
from megalite.convert.tokenizer_files import read_tokenizer
from megalite.data import Tokenizer
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes

RELEASE, VERSION = "release", 3.0
FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?", re.ASCII)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "head.output.weight"
# Dictionaries in dictionaries before megatron.core, whose own names have dots in them.
NESTED = (
    "language_model.embedding.word_embeddings.",
    "language_model.embedding.position_embeddings.",
    "language_model.encoder.",
    "language_model.output_layer.",
    "word_embeddings_for_head.",
)

# What Megatron-LM's loader looks at besides the model.
RUN_ARGS: Mapping[str, Any] = {
    "expert_model_parallel_size": 1,
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "iteration": 0,
    "no_save_optim": True,
    "no_save_rng": True,
    "sequence_parallel": False,
    "data_parallel_random_init": False,
    "bert_binary_head": False,
    "tokenizer_type": None,
    "ckpt_format": "torch",
    "use_dist_ckpt": False,
}


@dataclass(frozen=True)
class ShardLocation:
    """Where one rank's part of a tensor stands."""

    path: Path
    model: int
    name: str
    entry: tuple[str, tuple[int, ...]]


class MegatronSource:
    """A checkpoint of Megatron-LM: its newest iteration, `ckpt_step`, or an iteration's directory itself.

    true_vocab_size: tokens without padding; None takes what the file says, else all rows.

    The files are pickles: the caller has asked whether they are trusted. They are opened in another process, by
    torch's weights-only unpickler. Raises ConfigError for a model that we do not have, CheckpointError for files that
    are missing, damaged or hostile.
    """

    def __init__(
        self, directory: Path | str, ckpt_step: int | None = None, *, true_vocab_size: int | None = None
    ) -> None:
        self.directory = _iteration(Path(directory), ckpt_step)
        self.origin = Origin()
        stages = _stages(self.directory)
        self._unpickler = Unpickler()
        listings = {path: self._unpickler.open(path) for ranks in stages for path in ranks}
        first = listings[stages[0][0]]
        where = f"{stages[0][0]}: args"
        if first.args is None:
            raise CheckpointError(f"{stages[0][0]}: holds no args, so the number of attention heads is unknown")
        _check_grid(first, stages, where)
        for path, listing in listings.items():
            if (listing.version, listing.iteration) != (first.version, first.iteration):
                raise CheckpointError(
                    f"{path}: iteration {listing.iteration}, version {listing.version}; {stages[0][0].parent.name} has "
                    f"{first.iteration} and {first.version}: files of two checkpoints"
                )
        self._version = first.version
        self._places = dict(_places(stages, listings))
        rows = sum(place.entry[1][0] for place in self._places.get(EMBEDDING, []) if place.entry[1])
        legacy = any(name.startswith("language_model.") for name in first.models[0])
        rows = max(1, rows)
        self.model: ModelConfig = read_args(first.args, where, legacy=legacy, rows=rows, vocab_size=true_vocab_size)
        self._check()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Megatron's checkpoints hold none; one may lie beside the iterations."""
        return read_tokenizer(self.directory.parent, self.model.vocab_size)

    def read(self, name: str) -> Tensor:
        places = self._places[name]
        parts = [self._unpickler.read(place.path, place.model, place.name, place.entry) for place in places]
        if ".attention.qkv." in name:
            parts = [untangle(self.model, part, self._version) for part in parts]
        return rule_of(name)[0].cut.to_ours(self.model, parts)

    def _check(self) -> None:
        """Every tensor of the model is there, in parts that make up its shape, and no other."""
        shapes = parameter_shapes(self.model)
        missing = sorted(shapes.keys() - self._places.keys())
        if missing:
            raise CheckpointError(f"{self.directory}: tensors are missing: {', '.join(missing[:3])}")
        tied = OUTPUT in self._places and OUTPUT not in shapes
        for name, places in self._places.items():
            expected = shapes.get(name) or (shapes[EMBEDDING] if tied and name == OUTPUT else None)
            if expected is None:
                raise CheckpointError(f"{places[0].path}: a model of these args has no {places[0].name}")
            parts = [torch.empty(place.entry[1], device="meta") for place in places]
            try:
                found = tuple(rule_of(name)[0].cut.to_ours(self.model, parts).shape)
            except (IndexError, RuntimeError):
                found = ()
            if found != expected:
                what = f"shape {list(places[0].entry[1])}, args say a part of {list(expected)}"
                raise CheckpointError(f"{places[0].path}: {places[0].name}: {what}")
        if tied and not torch.equal(self.read(EMBEDDING), self.read(OUTPUT)):
            raise CheckpointError(
                f"{self.directory}: {self._places[OUTPUT][0].name} differs from the embedding, though args tie them"
            )


def _iteration(directory: Path, ckpt_step: int | None) -> Path:
    """The directory that holds the ranks' directories. Raises CheckpointError."""
    if not directory.is_dir():
        what = "is a file; give the directory that holds mp_rank_XX" if directory.exists() else "no such directory"
        raise CheckpointError(f"--load={directory}: {what}")
    if _has_ranks(directory):
        if ckpt_step is not None:
            raise CheckpointError(f"--ckpt-step={ckpt_step}: --load={directory} is one iteration; drop one of the two")
        return directory
    chosen = directory_name(ckpt_step) if ckpt_step is not None else _tracked(directory)
    if not (directory / chosen).is_dir():
        raise CheckpointError(f"--load={directory}: {chosen} is not there")
    if not _has_ranks(directory / chosen):
        raise CheckpointError(
            f"--load={directory}: {chosen} holds no mp_rank_00: Megatron-LM's format torch is read, torch_dist is not"
        )
    return directory / chosen


def _tracked(directory: Path) -> str:
    if not (directory / TRACKER).is_file():
        raise CheckpointError(f"--load={directory}: no {TRACKER}; give an iteration's directory or --ckpt-step")
    said = read_small(directory / TRACKER, 64).decode(errors="replace").strip()
    if said == RELEASE:
        return RELEASE
    if not re.fullmatch(r"\d{1,12}", said, re.ASCII):
        raise CheckpointError(f"{directory / TRACKER}: {said[:40]!r} is neither a number nor {RELEASE}")
    return directory_name(int(said))


def _has_ranks(directory: Path) -> bool:
    return any(directory.glob("mp_rank_*"))


def _stages(directory: Path) -> list[list[Path]]:
    """The files, by stage and tensor-parallel rank. Raises CheckpointError where one is missing."""
    grid: dict[tuple[int, int], Path] = {}
    for found in sorted(directory.glob("mp_rank_*")):
        match = RANK.fullmatch(found.name)
        if match is None:
            raise CheckpointError(f"{found}: not mp_rank_TT or mp_rank_TT_PPP (experts are not supported)")
        grid[int(match[2] or 0), int(match[1])] = found
    stages, ranks = (max(place[i] for place in grid) + 1 for i in (0, 1))
    missing = [(t, p) for p in range(stages) for t in range(ranks) if (p, t) not in grid]
    if missing:
        what = f"tensor-parallel rank {missing[0][0]} of stage {missing[0][1]}"
        raise CheckpointError(f"{directory}: {what} is missing ({ranks} x {stages} expected)")
    return [[_file(grid[p, t]) for t in range(ranks)] for p in range(stages)]


def _file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory}: holds no {FILES[0]}")


def _check_grid(first: Listing, stages: list[list[Path]], where: str) -> None:
    """Raises CheckpointError where `args` name other sizes than the directories."""
    assert first.args is not None
    said = first.args
    tensor = said.get("tensor_model_parallel_size", said.get("model_parallel_size", len(stages[0])))
    pipeline = said.get("pipeline_model_parallel_size", len(stages))
    if (tensor, pipeline) != (len(stages[0]), len(stages)):
        raise CheckpointError(
            f"{where}: say {tensor} x {pipeline} ranks (tensor x pipeline), {len(stages[0])} x {len(stages)} are there"
        )
    if first.version not in (0, 1) and first.version < 2:
        raise CheckpointError(f"{where}: checkpoint_version {first.version} not supported (0, 1 and 2 or later)")


def _places(stages: list[list[Path]], listings: Mapping[Path, Listing]) -> Iterator[tuple[str, list[ShardLocation]]]:
    """Logical name -> its parts over tensor-parallel ranks, layers counted through all stages."""
    known, seen, before = megatron_names(), set(), 0
    for virtual in range(max(len(listing.models) for listing in listings.values())):
        for ranks in stages:
            own = set()
            for name in _names(listings[ranks[0]], virtual, ranks[0]):
                plain = plain_name(name)
                index = re.search(r"\.layers\.(\d{1,6})\.", plain)
                ours = known.get(plain.replace(f".{index[1]}.", ".{i}.", 1) if index else plain)
                if ours is None:
                    raise CheckpointError(f"{ranks[0]}: no supported model has {name[:80]}")
                if index:
                    own.add(int(index[1]))
                    ours = ours.replace("{i}", str(before + int(index[1])))
                if ours in seen:
                    raise CheckpointError(f"{ranks[0]}: {name[:80]} appears twice")
                seen.add(ours)
                yield ours, [_place(path, listings[path], virtual, name) for path in ranks]
            if own != set(range(len(own))):
                raise CheckpointError(f"{ranks[0]}: its layers are not numbered 0, 1, ...")
            before += len(own)


def _names(listing: Listing, virtual: int, path: Path) -> list[str]:
    if virtual >= len(listing.models):
        raise CheckpointError(f"{path}: {len(listing.models)} virtual stages, another file has more")
    return [name for name in listing.models[virtual] if not name.endswith(IGNORED)]


def _place(path: Path, listing: Listing, virtual: int, name: str) -> ShardLocation:
    if virtual >= len(listing.models) or name not in listing.models[virtual]:
        raise CheckpointError(f"{path}: {name[:80]} is missing")
    return ShardLocation(path, virtual, name, listing.models[virtual][name])


def write_megatron(
    source: ModelSource,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    implementation: str = "transformer_engine",
) -> Path:
    """A `release` checkpoint that Megatron-LM loads with these sizes; returns its directory.

    dtype: of the stored weights; None keeps each as it is. implementation: whose names they get (IMPLEMENTATIONS).
    Raises ConfigError where Megatron-LM has no such model or cannot cut it so, CheckpointError where it cannot be
    written. Memory: one file.
    """
    model = source.model
    check_cut(model, tensor_parallel, pipeline_parallel)
    args = write_args(model, implementation)
    args |= {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None,
        "padded_vocab_size": model.padded_vocab_size(tensor_parallel),
        **RUN_ARGS,
    }
    with staged(directory, model=model, dtype=dtype) as staging:
        for stage in range(pipeline_parallel):
            for rank in range(tensor_parallel):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline_parallel > 1 else "")
                (staging / RELEASE / name).mkdir(parents=True)
                weights = _rank_weights(source, (stage, pipeline_parallel), (rank, tensor_parallel), implementation)
                stored = {n: None if t is None else t.to(dtype or t.dtype) for n, t in weights}
                _write_file(staging / RELEASE / name / FILES[0], stored, args, implementation)
        (staging / TRACKER).write_text(RELEASE)
        fsync_directory(staging / RELEASE)
    return directory


def _rank_weights(
    source: ModelSource, stage: tuple[int, int], rank: tuple[int, int], implementation: str
) -> Iterator[tuple[str, Tensor | None]]:
    """Names and values of one file; stage and rank are (number, how many)."""
    model = source.model
    layers = model.num_layers // stage[1]
    last, first = stage[0] == stage[1] - 1, stage[0] == 0
    for ours in parameter_shapes(model):
        rule, index = rule_of(ours)
        here = int(index) // layers == stage[0] if index else (first if ours.startswith("embedding.") else last)
        if not here:
            continue
        part = rule.cut.to_theirs(model, source.read(ours), rank[1])[rank[0]]
        # memory of its own: torch.save stores the whole of what a tensor is a view of
        yield name_of(ours, implementation, int(index or 0) % layers), part.clone(memory_format=torch.contiguous_format)
    if last and not first and not model.untie_embeddings_and_output_weights:
        part = rule_of(EMBEDDING)[0].cut.to_theirs(model, source.read(EMBEDDING), rank[1])[rank[0]]
        yield COPY["legacy" if implementation == "legacy" else "local"], part.clone()
    if implementation == "transformer_engine":
        for layer in range(layers):
            yield from ((f"{CORE.replace('{i}', str(layer))}{name}._extra_state", None) for name in EXTRA_STATES)


def _write_file(path: Path, stored: Mapping[str, Tensor | None], args: Mapping[str, Any], implementation: str) -> None:
    dtype = next(values.dtype for values in stored.values() if values is not None)
    named = argparse.Namespace(**args, params_dtype=dtype, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    content = {
        "args": named,
        "checkpoint_version": VERSION,
        "iteration": 0,
        "model": _nested(stored) if implementation == "legacy" else dict(stored),
    }
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # of a full disk it only tells that its own count is off
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(path.parent)


def _nested(stored: Mapping[str, Tensor | None]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, values in stored.items():
        prefix = next(prefix for prefix in NESTED if name.startswith(prefix))
        inner = tree
        for key in prefix.rstrip(".").split("."):
            inner = inner.setdefault(key, {})
        inner[name.removeprefix(prefix)] = values
    return tree
