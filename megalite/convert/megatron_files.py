"""Megatron-LM's `torch` checkpoints on disk, read rank by rank through another process.

latest_checkpointed_iteration.txt                 100, or release
iter_0000100/mp_rank_00/model_optim_rng.pt        tensor-parallel rank; of a pipeline mp_rank_00_000, with the stage;
                                                  where ranks share experts the expert rank comes last
    args, checkpoint_version, iteration, model (virtual stages: model0, model1, ...), optimizer, ...
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import NOT_WHOLE, TRACKER, directory_name, read_small
from megalite.convert.dcp_files import METADATA
from megalite.convert.megatron_args import read_args
from megalite.convert.megatron_names import (
    APART,
    IGNORED,
    Location,
    Parts,
    expert_of,
    megatron_names,
    plain_name,
    untangle,
)
from megalite.convert.megatron_process import Listing, Unpickler
from megalite.convert.source import ForeignModel, stored_shapes
from megalite.errors import CheckpointError

RELEASE, VERSION = "release", 3.0
FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?", re.ASCII)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "head.output.weight"


class MegatronParts(ForeignModel):
    """A checkpoint of Megatron-LM whose tensors are made up of parts.

    directory: the iteration's. Raises CheckpointError where a tensor is missing, damaged or of another shape.
    """

    parts: Mapping[str, Parts]
    version: float = VERSION

    def __init__(self, directory: Path) -> None:
        self.directory, self.home = directory, directory.parent  # no checkpoint holds a tokenizer; it lies beside

    def read(self, name: str) -> Tensor:
        return self.join(self.parts[name])

    def join(self, parts: Parts, *, meta: bool = False) -> Tensor:
        """The logical tensor. meta: on the meta device, where it costs nothing. Raises what `Parts.join` does."""

        def values(place: Location) -> Tensor:
            found = torch.empty(place.entry[1], device="meta") if meta else self.part(place)
            return untangle(self.model, found, self.version) if ".attention.qkv." in parts.ours else found

        return parts.join(self.model, values)

    def part(self, place: Location) -> Tensor:
        """What lies there."""
        raise NotImplementedError

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        """Of the logical tensor; () where the parts do not fit."""
        try:
            return tuple(self.join(parts, meta=True).shape)
        except (IndexError, RuntimeError, ValueError):
            return ()

    def check(self) -> None:
        """Every tensor of the model is there, in parts that make up its shape, and no other."""
        shapes = stored_shapes(self.model)
        if missing := sorted(shapes.keys() - self.parts.keys()):
            raise CheckpointError(f"{self.directory}: tensors are missing: {', '.join(missing[:3])}")
        tied = OUTPUT in self.parts and OUTPUT not in shapes
        for name, parts in self.parts.items():
            expected = shapes.get(name) or (shapes[EMBEDDING] if tied and name == OUTPUT else None)
            one = parts.first
            if expected is None:
                raise CheckpointError(f"{one.path}: a model of these args has no {one.name}")
            if self.shape_of(parts) != expected:
                what = f"shape {list(one.entry[1])}, args say a part of {list(expected)}"
                raise CheckpointError(f"{one.path}: {one.name}: {what}")
        if tied and not torch.equal(self.read(EMBEDDING), self.read(OUTPUT)):
            raise CheckpointError(
                f"{self.directory}: {self.parts[OUTPUT].first.name} differs from the embedding, but args tie both"
            )


class MegatronSource(MegatronParts):
    """An iteration in Megatron-LM's format `torch`.

    true_vocab_size: tokens without padding; None takes what the file says, else all rows.

    The files are pickles: the caller has asked whether they are trusted. They are opened in another process, by
    torch's weights-only unpickler. Raises ConfigError for a model that we do not have, CheckpointError for files that
    are missing, damaged or hostile.
    """

    def __init__(self, directory: Path, true_vocab_size: int | None) -> None:
        super().__init__(directory)
        directories = _directories(self.directory)
        self._unpickler = Unpickler()
        listings = {path: self._unpickler.open(path) for path in map(_file, directories.values())}
        path, first = next(iter(listings.items()))
        where = f"{path}: args"
        if first.args is None:
            raise CheckpointError(f"{path}: holds no args, so the number of attention heads is unknown")
        grid = _grid(self.directory, directories, first.args, where)
        if first.version not in (0, 1) and first.version < 2:
            raise CheckpointError(f"{where}: checkpoint_version {first.version} not supported (0, 1 and 2 or later)")
        for other, listing in listings.items():
            if (listing.version, listing.iteration) != (first.version, first.iteration):
                raise CheckpointError(
                    f"{other}: iteration {listing.iteration}, version {listing.version}; {path.parent.name} has "
                    f"{first.iteration} and {first.version}: files of two checkpoints"
                )
        self.version = first.version
        self.parts = found = {}
        for name, parts in _parts(grid, listings):
            if name in found:
                raise CheckpointError(f"{parts.first.path}: {parts.first.name[:80]} appears twice")
            found[name] = parts
        cuts = found[EMBEDDING].places[0] if EMBEDDING in found else []
        rows = sum(place.entry[1][0] for place in cuts if place.entry[1])
        legacy = any(name.startswith("language_model.") for name in first.models[0])
        self.model = read_args(first.args, where, legacy=legacy, rows=max(1, rows), vocab_size=true_vocab_size)
        self.check()

    def part(self, place: Location) -> Tensor:
        return self._unpickler.read(place.path, place.at[0], place.name, place.entry)


def find_iteration(directory: Path, ckpt_step: int | None) -> Path:
    """The directory that holds the ranks' directories, or a `.metadata`. Raises CheckpointError."""
    if not directory.is_dir():
        what = "is a file; give the run's directory, or an iteration's" if directory.exists() else "no such directory"
        raise CheckpointError(f"`load`={directory}: {what}")
    if _has_ranks(directory):
        if ckpt_step is not None:
            raise CheckpointError(f"`ckpt_step`={ckpt_step}: `load`={directory} is one iteration; drop one of the two")
        return directory
    _check_whole(directory, directory)
    chosen = directory_name(ckpt_step) if ckpt_step is not None else _tracked(directory)
    if not (directory / chosen).is_dir():
        raise CheckpointError(f"`load`={directory}: {chosen} is not there")
    _check_whole(directory, directory / chosen)
    if not _has_ranks(directory / chosen):
        raise CheckpointError(
            f"`load`={directory}: {chosen} holds neither mp_rank_00 (Megatron-LM's format torch) nor {METADATA} "
            "(torch_dist)"
        )
    return directory / chosen


def _tracked(directory: Path) -> str:
    if not (directory / TRACKER).is_file():
        raise CheckpointError(f"`load`={directory}: no {TRACKER}; give an iteration's directory or `ckpt_step`")
    said = read_small(directory / TRACKER, 64).decode(errors="replace").strip()
    if said == RELEASE:
        return RELEASE
    if not re.fullmatch(r"\d{1,12}", said, re.ASCII):
        raise CheckpointError(f"{directory / TRACKER}: {said[:40]!r} is neither a number nor {RELEASE}")
    return directory_name(int(said))


def _check_whole(load: Path, folder: Path) -> None:
    """Raises CheckpointError where a save in Megatron-LM's format torch_dist was interrupted."""
    if not _has_ranks(folder) and any(folder.glob("*.distcp")):
        raise CheckpointError(f"`load`={load}: {folder.name} {NOT_WHOLE}")


def _has_ranks(directory: Path) -> bool:
    return any(directory.glob("mp_rank_*")) or (directory / METADATA).is_file()


def _directories(directory: Path) -> dict[tuple[int, ...], Path]:
    """The numbers in a rank's name -> its directory, in their order. Raises CheckpointError."""
    found: dict[tuple[int, ...], Path] = {}
    for path in sorted(directory.glob("mp_rank_*")):
        match = RANK.fullmatch(path.name)
        numbers = () if match is None else tuple(int(number) for number in match.groups() if number is not None)
        if match is None or (found and len(numbers) != len(next(iter(found)))):
            raise CheckpointError(f"{path}: not mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE, as all should be")
        found[numbers] = path
    return dict(sorted(found.items()))


def _grid(
    directory: Path, directories: Mapping[tuple[int, ...], Path], args: Mapping[str, Any], where: str
) -> list[tuple[list[Path], list[list[Path]]]]:
    """Of each stage its files tensor rank by tensor rank (whole tensors and cut ones are the same in all of its expert
    ranks), and expert rank by expert rank those that share its experts. Raises CheckpointError where a file is missing,
    or `args` name other sizes."""
    # mp_rank_TT_NNN: of a pipeline, unless there is none and experts are dealt out
    experts_only = args.get("pipeline_model_parallel_size", 2) == 1 and _expert_ranks(args) > 1
    grid: dict[tuple[int, int, int], Path] = {}  # stage, tensor rank, expert rank
    for (rank, *rest), path in directories.items():
        place = (0, rest[0]) if len(rest) == 1 and experts_only else (*rest, 0, 0)[:2]
        grid[place[0], rank, place[1]] = _file(path)
    stages, ranks, experts = (max(place[i] for place in grid) + 1 for i in range(3))
    dense: dict[tuple[int, int], Path] = {}
    for (stage, rank, _), path in grid.items():
        dense.setdefault((stage, rank), path)
    if missing := [(t, p) for p in range(stages) for t in range(ranks) if (p, t) not in dense]:
        what = f"tensor-parallel rank {missing[0][0]} of stage {missing[0][1]}"
        raise CheckpointError(f"{directory}: {what} is missing ({ranks} x {stages} expected)")
    _check_sizes(args, (ranks, stages, experts), where)
    within = args.get("expert_tensor_parallel_size") if args.get("num_experts") else None
    within = ranks if within is None else within
    if within not in (1, ranks):
        raise CheckpointError(f"{directory}: expert_tensor_parallel_size {within} not supported (1 or {ranks})")
    found = []
    for stage in range(stages):
        sharing = [[grid[stage, t, e] for t in range(ranks) if (stage, t, e) in grid][:within] for e in range(experts)]
        if short := [e for e, files in enumerate(sharing) if len(files) < within]:
            raise CheckpointError(f"{directory}: files of expert rank {short[0]} of stage {stage} are missing")
        found.append(([dense[stage, t] for t in range(ranks)], sharing))
    return found


def _expert_ranks(args: Mapping[str, Any]) -> int:
    """Ranks that share the experts, by `args`."""
    size = args.get("expert_model_parallel_size")
    return size if type(size) is int and args.get("num_experts") else 1


def _file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory}: holds no {FILES[0]}")


def _check_sizes(args: Mapping[str, Any], there: tuple[int, int, int], where: str) -> None:
    """Raises CheckpointError where `args` name other sizes than the directories: tensor, pipeline, expert."""
    tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size", there[0]))
    expected = (tensor, args.get("pipeline_model_parallel_size", there[1]), _expert_ranks(args))
    if expected == there:
        return
    kinds = ("tensor", "pipeline", "expert")[: 3 if max(expected[2], there[2]) > 1 else 2]
    sizes = [" x ".join(map(str, size[: len(kinds)])) for size in (expected, there)]
    raise CheckpointError(f"{where}: say {sizes[0]} ranks ({' x '.join(kinds)}), {sizes[1]} are there")


def _parts(
    grid: Iterable[tuple[list[Path], list[list[Path]]]], listings: Mapping[Path, Listing]
) -> Iterator[tuple[str, Parts]]:
    """Logical name -> its parts, layers counted through all stages."""
    known = megatron_names()
    before = 0
    for virtual in range(max(len(listing.models) for listing in listings.values())):
        for ranks, sharing in grid:
            own = set()
            for name in _names(listings[ranks[0]], virtual, ranks[0]):
                plain = plain_name(name)
                index = re.search(r"\.layers\.(\d{1,6})\.", plain)
                if index:
                    own.add(int(index[1]))
                if expert_of(plain) is not None:
                    continue
                ours = known.get(plain.replace(f".{index[1]}.", ".{i}.", 1) if index else plain)
                if ours is None:
                    raise CheckpointError(f"{ranks[0]}: no supported model has {name[:80]}")
                if index:
                    ours = ours.replace("{i}", str(before + int(index[1])))
                places = [_place(path, listings[path], virtual, name) for path in ranks]
                yield ours, Parts(ours, places[0], [places])
            if own != set(range(len(own))):
                raise CheckpointError(f"{ranks[0]}: its layers are not numbered 0, 1, ...")
            yield from _expert_parts(sharing, listings, virtual, before).items()
            before += len(own)


def _expert_parts(
    sharing: list[list[Path]], listings: Mapping[Path, Listing], virtual: int, before: int
) -> dict[str, Parts]:
    """Logical name -> its parts, of the experts of a stage whose first layer is number `before`."""
    found: dict[str, Parts] = {}
    for ranks in sharing:
        here: dict[str, dict[int | None, list[Location]]] = {}
        for name in _names(listings[ranks[0]], virtual, ranks[0]):
            if (expert := expert_of(plain_name(name))) is not None:
                layer, what, number = expert
                experts = here.setdefault(f"layers.{before + layer}.mlp.experts.{what}", {})
                if number in experts:
                    raise CheckpointError(f"{ranks[0]}: {name[:80]} appears twice")
                experts[number] = [_place(path, listings[path], virtual, name) for path in ranks]
        for ours, experts in here.items():
            whole = None in experts
            if not whole and set(experts) != set(range(len(experts))) or whole and len(experts) > 1:
                raise CheckpointError(f"{ranks[0]}: the experts of {ours} are not numbered 0, 1, ...")
            places = [experts[None]] if whole else [experts[number] for number in range(len(experts))]
            apart = APART[ours.split(".")[4]] if whole else None
            found.setdefault(ours, Parts(ours, places[0][0], [], apart=apart)).places.extend(places)
    return found


def _names(listing: Listing, virtual: int, path: Path) -> list[str]:
    if virtual >= len(listing.models):
        raise CheckpointError(f"{path}: {len(listing.models)} virtual stages, another file has more")
    return [name for name in listing.models[virtual] if not name.endswith(IGNORED)]


def _place(path: Path, listing: Listing, virtual: int, name: str) -> Location:
    if virtual >= len(listing.models) or name not in listing.models[virtual]:
        raise CheckpointError(f"{path}: {name[:80]} is missing")
    return Location(path, name, (virtual,), listing.models[virtual][name])
