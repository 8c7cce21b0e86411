"""Data of a run: tokenizer, splits, and the batches that training and evaluation read."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megalite.comm import ParallelMesh, World, all_gather_json, patiently
from megalite.config import Config, cache_problem, with_vocab_size
from megalite.data import (
    BatchLoader,
    Dataset,
    Datasets,
    DocumentMasks,
    SampleSource,
    Tokenizer,
    build_datasets,
    build_tokenizer,
    cache_directory,
    phase_differences,
    resolve_vocab_size,
    survey_differences,
    surveys_to_meta,
)
from megalite.errors import ConfigError, DataError
from megalite.microbatch import Microbatch
from megalite.parallel.context import SequenceCut
from megalite.train.foreign import ModuleInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """Everything that reads data in a run; the same on tensor- and pipeline-parallel peers."""

    config: Config
    mesh: ParallelMesh
    tokenizer: Tokenizer
    datasets: Datasets
    device: torch.device

    def train_loader(self, consumed_samples: int) -> BatchLoader:
        """Training batches after `consumed_samples` samples."""
        assert self.datasets.train is not None
        lengths, whole = self.config.length_schedule, self.config.model.seq_length
        return self._loader(self.datasets.train, consumed_samples, lambda consumed: whole // lengths.at(consumed))

    def evaluation_length(self, consumed_samples: int) -> int:
        """Tokens of the sequences of an evaluation: of those of the iteration that came last."""
        sizes = self.config.batch_size_schedule(self.mesh.size("world"))
        before = max(1, sizes.iterations_for(consumed_samples)) - 1
        return self.config.length_schedule.at(sizes.samples_after(before))

    def evaluation(self, dataset: Dataset, length: int) -> tuple[Iterable[list[Microbatch]], int]:
        """The batches of one evaluation, and how many these are: the whole split, or its first `--eval-iters` batches,
        always the same tokens, in sequences of `length`. Of a number that nobody gave, a small split is read once and
        not several times."""
        training, samples = self.config.training, self.config.global_batch_size(self.mesh.size("world"))
        pieces, most = self.config.model.seq_length // length, training.most_eval_iters
        if training.full_validation or training.eval_iters is None:
            source = dataset.sequential()
            whole = -(-len(source) // samples)
            if training.full_validation or whole <= most:
                return self._loader(source, 0, lambda _: pieces, threads=False).full_pass(samples), whole
        return islice(self._batches(dataset, samples, pieces), most), most

    @property
    def cut(self) -> Callable[[Microbatch], Microbatch]:
        """Takes what of every sequence this rank computes, as its layers want it."""
        foreign = self.config.model.is_foreign
        if self.mesh.size("cp") == 1:
            return ModuleInput.of if foreign else lambda microbatch: microbatch
        cut = SequenceCut(self.mesh.coordinate("cp"), self.mesh.size("cp"), self.mesh.size("cp_ring"))
        return (lambda microbatch: ModuleInput.of(cut(microbatch))) if foreign else cut

    def token_bytes(self) -> Tensor | None:
        """int32 `[V]`, on the device: bytes of text that each token spells; None where the tokenizer cannot say."""
        table = self.tokenizer.token_bytes()
        if table is None:
            return None
        bytes_of = torch.zeros(self.config.model.vocab_size, dtype=torch.int32)
        bytes_of[: len(table)] = torch.from_numpy(table)
        return bytes_of.to(self.device)

    def _batches(self, dataset: Dataset, samples: int, pieces: int) -> Iterator[list[Microbatch]]:
        with self._loader(dataset, 0, lambda _: pieces) as loader:
            while True:
                yield loader.next_batch(samples)

    def _loader(
        self, source: SampleSource, consumed_samples: int, pieces: Callable[[int], int], *, threads: bool = True
    ) -> BatchLoader:
        data = self.config.data
        return BatchLoader(
            source,
            consumed_samples=consumed_samples,
            micro_batch_size=self.config.training.micro_batch_size,
            dp_rank=self.mesh.coordinate("stream"),
            dp_size=self.mesh.size("stream"),
            masks=DocumentMasks.of(data, self.tokenizer.eod_id),
            pieces=pieces,
            num_workers=data.num_workers if threads else 0,
            pin_memory=self.device.type == "cuda",
            parts=self.datasets.blend_parts if source is self.datasets.train else None,
        )


def resolve_tokenizer(config: Config) -> tuple[Config, Tokenizer]:
    """The tokenizer, and the configuration with the vocabulary size that it asks for. Raises DataError, and
    ConfigError for what does not go with it."""
    asked = config.model.vocab_size or None
    tokenizer = build_tokenizer(config.data, vocab_size=asked)
    config = with_vocab_size(config, resolve_vocab_size(tokenizer, asked))
    if (problem := cache_problem(config)) is not None:
        raise ConfigError(problem)
    return config, tokenizer


def open_data(
    config: Config,
    mesh: ParallelMesh,
    tokenizer: Tokenizer,
    world: World,
    *,
    earlier_requests: Sequence[tuple[int, ...]],
) -> RunData:
    """Opens the splits. Rank 0 builds what is not cached yet, as long as it takes, then the others map it (or build it,
    where they do not see rank 0's disk). Raises DataError."""

    def build() -> Datasets:
        return open_datasets(
            *(config, world.size, tokenizer),
            earlier_requests=earlier_requests,
            ranks_here=world.local_size,
            warns=mesh.world.is_first,
        )

    first = patiently(build if mesh.world.is_first else None, mesh.world)
    datasets = patiently(build if first is None else None, mesh.world) or first
    assert datasets is not None
    _check_alike(datasets, mesh)
    return RunData(config, mesh, tokenizer, datasets, world.device)


def _check_alike(datasets: Datasets, mesh: ParallelMesh) -> None:
    """Raises DataError where a rank reads other files than rank 0 (an old copy on its node). Collective."""
    surveys = [surveys_to_meta(datasets.surveys), [asdict(phase) for phase in datasets.phases]]
    told = all_gather_json(xxhash.xxh3_64_hexdigest(json.dumps(surveys).encode()), mesh.world)
    others = [rank for rank, digest in enumerate(told) if digest != told[0]]
    if others:
        raise DataError(
            f"`data_path`: rank {others[0]} reads other data than rank 0 ({len(others)} of {len(told)} ranks do); "
            "every node needs the same files at the same path"
        )


def open_datasets(
    config: Config,
    world: int,
    tokenizer: Tokenizer,
    *,
    earlier_requests: Sequence[tuple[int, ...]] = (),
    ranks_here: int = 1,
    warns: bool = True,
    look: Path | None = None,
) -> Datasets:
    """The splits of a run of `world` ranks, each with the samples that it needs. warns: see `build_datasets`. look: one
    sample of each, kept there. Raises DataError."""
    training, sizes = config.training, config.batch_size_schedule(world)
    samples, evaluates, per_evaluation = 1, training.evaluates, 1 if look is not None else None
    if look is None and not training.skip_train:
        samples = sizes.samples_after(config.train_iterations(world))
    if look is None and not training.full_validation:
        per_evaluation = training.most_eval_iters * sizes.final
    datasets = build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        train_samples=0 if training.skip_train else samples,
        valid_samples=per_evaluation if evaluates else 0,
        test_samples=per_evaluation if evaluates else 0,
        seed=training.seed,
        tokenizer=tokenizer,
        cache_dir=look or cache_of(config),
        earlier_requests=earlier_requests,
        vocab_size=config.model.vocab_size,
        ranks_here=ranks_here,
        warns=warns,
    )
    if warns and look is None:
        warn_of_talks(config, datasets)
    return datasets


def warn_of_talks(config: Config, datasets: Datasets) -> None:
    """Names the flags that conversations are usually trained with, where they are not given, and says how many of them
    samples cut."""
    missing = [
        *(["`reset_attention_mask` (those of a sample see each other)"] * (not config.data.reset_attention_mask)),
        *(
            ["`calculate_per_token_loss` (a token of a short answer weighs more than one of a long answer)"]
            * (not config.training.calculate_per_token_loss)
        ),
    ]
    cut, number = datasets.talks
    if number and missing:
        logger.warning("conversations are trained on without %s", " and without ".join(missing))
    if cut:
        logger.info(
            "a sample ends inside of %s of %s conversations (%.0f %%; each epoch counts), and the next goes on without "
            "what was before; a longer `seq_length` cuts fewer",
            f"{cut:,}", f"{number:,}", 100 * cut / number,
        )  # fmt: skip


def cache_of(config: Config) -> Path:
    """Where tokens of texts and orders of samples are kept: of mock data within the run's folder, not beside it."""
    given, folder = config.data.data_cache_path, config.checkpoint.run_folder
    if config.data.mock_data and folder is not None and not given:
        given = str(Path(folder) / "data_cache")
    return cache_directory(given, folder)


def changed_data(earlier: Mapping[str, Any], datasets: Datasets, config: Config) -> list[str]:
    """How the data differ from what the checkpoint has recorded about its own. earlier: its meta.

    Raises DataError where they do, unless `--allow-data-change` is set.
    """
    if config.training.skip_train:
        return []
    found = survey_differences(earlier.get("data", {}), datasets.surveys) + phase_differences(earlier, datasets.phases)
    if found and not config.checkpoint.allow_data_change:
        raise DataError(
            f"{'; '.join(found)}: not the data that the checkpoint was trained on, whose sample order it would "
            "continue; give it those, or continue with these (`allow_data_change`)"
        )
    return found


def appended_data(earlier: Sequence[tuple[int, ...]], datasets: Datasets) -> list[str]:
    """What a longer training does to the order of the samples, phase by phase; empty where nothing is appended."""
    now = [datasets.train_requests, *(phase.requests for phase in datasets.phases[1:])]
    return [
        f"the order of the first {before[-1]:,} samples{f' of phase {number}' if len(earlier) > 1 else ''} is kept, "
        f"{after[-1] - before[-1]:,} are appended"
        for number, (before, after) in enumerate(zip(earlier, now, strict=False), 1)
        if before and before != after
    ]
