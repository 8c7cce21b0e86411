"""Evaluation of a loaded model on text: loss, perplexity, bits per byte and word perplexity.

    text file    -> ids of one document -> windows of s + 1 tokens (overlapping, if asked for) -+-> losses of all
    --data-path  -> the data room's split, once, in the order of its documents -----------------+   labels

Without overlap these are the windows of `--full-validation`, so the numbers agree with those of a training run. With
an overlap of n every label but those of the first window has at least n tokens of context; it is counted once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.comm import all_reduce_, patiently
from megalite.config import Config, DataConfig
from megalite.data import (
    MARKS,
    BatchLoader,
    Conversations,
    Datasets,
    DocumentMasks,
    GPTDataset,
    NullTokenizer,
    SampleSource,
    UnusableSplit,
    build_datasets,
    cache_directory,
    strip_suffix,
    utf8_length,
)
from megalite.errors import ConfigError, DataError
from megalite.inference.forwards import at_once, score_all
from megalite.inference.loaded_model import LoadedModel
from megalite.microbatch import Microbatch
from megalite.observe import Record, perplexity
from megalite.progress import OnProgress, no_progress

PARTS = ("train", "valid", "test")
FEW = 16
"""Tokens that a split of conversations has at least."""


@dataclass(frozen=True)
class Score:
    """The summed loss of some text."""

    loss_sum: float  # in nats
    num_tokens: int  # labels that it is the sum over
    num_bytes: int | None  # UTF-8 bytes that these labels spell; None for ids without text
    num_words: int | None = None  # of the text, where there was a text

    def record(self) -> Record:
        """`loss` (nats per token), `ppl`, and where they exist `bits_per_byte` and `word_ppl`."""
        loss = self.loss_sum / self.num_tokens
        record: Record = {"loss": loss, "ppl": perplexity(loss)}
        if self.num_bytes:
            record["bits_per_byte"] = self.loss_sum / math.log(2) / self.num_bytes
        if self.num_words:
            record["word_ppl"] = math.exp(min(700.0, self.loss_sum / self.num_words))
        counts = {"num_tokens": self.num_tokens, "num_bytes": self.num_bytes, "num_words": self.num_words}
        return record | {name: count for name, count in counts.items() if count is not None}


class TextWindows(SampleSource):
    """One document as samples of S + 1 tokens: each begins `stride` tokens after the last; the end is shorter."""

    def __init__(self, ids: NDArray[np.integer], *, seq_length: int, stride: int) -> None:
        self.seq_length, self.stops = seq_length, [1 + max(0, -(-(len(ids) - 1 - seq_length) // stride))]
        self._ids = ids
        self._stride = stride

    def expect(self, samples: Sequence[int]) -> None:
        """The text is in memory."""

    def read(self, sample: int, out: NDArray[np.int64], marks: NDArray[np.integer] | None = None) -> tuple[int, bool]:
        start = sample * self._stride
        part = self._ids[start : start + self.seq_length + 1]
        out[: len(part)] = part
        out[len(part) :] = 0
        return len(part), False


def score_text(
    loaded: LoadedModel,
    text: str,
    *,
    num_words: int | None = None,
    overlap: int = 0,
    micro_batch_size: int | None = None,
    on_progress: OnProgress = no_progress,
) -> Score:
    """Score `text` as one document. Its first token has no context and is not scored, unless something stands in front
    of it (`LoadedModel.front`).

    num_words: what the word perplexity divides by; None: the words of `text`. Raises DataError where the text is
    shorter than two tokens, ConfigError where `overlap` is not below the sequence length.
    """
    seq_length = loaded.config.model.seq_length
    if not 0 <= overlap < seq_length:
        raise ConfigError(f"`overlap`={overlap}: must be between 0 and `seq_length` - 1 = {seq_length - 1}")
    ids = np.concatenate([np.array(loaded.front, np.int64), loaded.tokenizer.encode_batch([text])[0]])
    if len(ids) < 2:
        raise DataError(f"the text has {len(ids)} tokens, at least 2 are needed: one to see and one to predict")
    windows = TextWindows(ids, seq_length=seq_length, stride=seq_length - overlap)
    score = score_source(loaded, windows, overlap=overlap, micro_batch_size=micro_batch_size, on_progress=on_progress)
    if score.num_bytes is None and not isinstance(loaded.tokenizer, NullTokenizer):
        # The ids do not spell all of the text, but here the text itself is known.
        unscored = "" if loaded.front else loaded.tokenizer.decode([int(ids[0])])
        score = dataclasses.replace(score, num_bytes=utf8_length(text) - utf8_length(unscored))
    return dataclasses.replace(score, num_words=len(text.split()) if num_words is None else num_words)


def score_source(
    loaded: LoadedModel,
    source: SampleSource,
    *,
    overlap: int = 0,
    micro_batch_size: int | None = None,
    on_progress: OnProgress = no_progress,
) -> Score:
    """Score every label of `source`; with `overlap`, of all samples but the first only labels from that one on.

    Collective: the ranks share the samples, and all of them get the score.
    """
    size = micro_batch_size or max(1, 8192 // source.seq_length)
    mesh = loaded.mesh
    token_bytes = loaded.tokenizer.token_bytes()
    widths = torch.from_numpy(np.zeros(1, np.int32) if token_bytes is None else token_bytes).long()
    together = size * mesh.size("stream") * at_once(loaded)
    total = torch.zeros(3, dtype=torch.float64, device=loaded.device)  # loss, tokens, bytes
    loader = BatchLoader(
        source,
        consumed_samples=0,
        micro_batch_size=size,
        dp_rank=mesh.coordinate("stream"),
        dp_size=mesh.size("stream"),
        masks=DocumentMasks.of(loaded.config.data, loaded.tokenizer.eod_id),
    )
    for number, given in enumerate(loader.full_pass(together), 1):
        microbatches = [_without_overlap(microbatch, overlap) for microbatch in given]
        sums = score_all(
            loaded, microbatches, lambda head, x, mb: (head.token_losses(x, mb).double() * mb.loss_mask).sum()
        )
        if sums and mesh.coordinate("tp") == 0:
            cut = [loaded.parts.cut(microbatches[number]) for number in sums]
            labels = torch.cat([mb.labels[mb.loss_mask.bool()] for mb in cut])
            spelled = int(widths[labels[labels < len(widths)]].sum())  # a vocabulary may be larger than its tokenizer
            counted = [sum(int(mb.loss_mask.sum()) for mb in cut), spelled]
            summed = torch.stack(list(sums.values())).sum()
            total += torch.cat((summed[None], torch.tensor(counted, device=total.device)))
        on_progress(min(number * together, len(source)), len(source), "")
    all_reduce_(total, mesh.world)
    loss_sum, num_tokens, num_bytes = total.tolist()
    return Score(loss_sum, round(num_tokens), None if token_bytes is None else round(num_bytes))


def _without_overlap(microbatch: Microbatch, overlap: int) -> Microbatch:
    """Labels that an earlier sample has counted weigh nothing."""
    mask = microbatch.loss_mask.clone()
    mask[microbatch.sample_ids > 0, :overlap] = 0
    return dataclasses.replace(microbatch, loss_mask=mask)


def open_data_path(loaded: LoadedModel, path: str, *, split: str | None, cache_path: str | None = None) -> SampleSource:
    """The samples of `--data-path`, once and in order. Collective: rank 0 tokenises what is not cached.

    Conversations (data with marks) are read one by one, whatever the run that saved the model was told.

    split: None for the whole file; `train`, `valid` or `test` for that part by the weights of the run that saved the
        model; or weights `A,B,C` of its own, of which the validation part is taken.
    Raises DataError where the data are missing, damaged, empty or of another tokenizer.
    """
    config = loaded.config
    name = split if split in PARTS else "valid"
    section = dataclasses.replace(
        config.data,
        data_path=() if split is None else (path,),
        train_data_path=(),
        valid_data_path=(path,) if split is None else (),
        test_data_path=(),
        data_args_path=None,
        data_schedule=None,
        validation_set_names=(),
        loss_by_part=False,
        mock_data=False,
        split=split if split is not None and split != name else config.data.split,
    )
    wanted: dict[str, Any] = {f"{part}_samples": None if part == name else 0 for part in PARTS}  # once, or not at all
    # conversations are cut below, so a split of few must not be refused for a window that is long
    marked = Path(f"{strip_suffix(path)}{MARKS}.idx").is_file()
    part = {"train": "training", "valid": "validation"}.get(name, name) + " part"
    which = part if split == name else f"{part} (its second weight, which is scored)"
    empty = f"the {which} of {path} is empty or shorter than one sample"
    unusable = f"`split`={split}: {empty}; without `split` the whole file is scored"

    def build() -> Datasets:
        return build_datasets(
            section,
            seq_length=min(config.model.seq_length, FEW) if marked else config.model.seq_length,
            **wanted,
            seed=config.training.seed,
            tokenizer=loaded.tokenizer,
            cache_dir=cache_directory(cache_path, None),
            vocab_size=config.model.vocab_size,
            warns=not marked,
        )

    world = loaded.mesh.world
    try:
        datasets = patiently(build if world.is_first else None, world)
        datasets = patiently(build if datasets is None else None, world) or datasets
    except UnusableSplit as error:
        raise DataError(str(error) if split is None else unusable) from None
    except DataError as error:  # of a flag that was not given
        raise DataError(error.text.replace("`valid_data_path`", "`data_path`")) from None
    dataset: GPTDataset | None = getattr(datasets, name)
    if dataset is None:
        raise DataError(unusable)
    if dataset.store.marks is not None:
        return Conversations(dataset, window=config.model.seq_length, unit=loaded.parts.unit)
    return dataset.sequential()


def as_measured(config: Config, seq_length: int | None, masks: Mapping[str, Any]) -> Config:
    """The configuration with windows of `seq_length` tokens (None: its own), and other effects of the end of a
    document, by the names of the data section. Raises ConfigError for more tokens than the model has positions."""
    model = config.model
    if seq_length is not None:
        if model.position_embedding_type == "learned_absolute" and seq_length > model.text_positions:
            raise ConfigError(
                f"`seq_length`={seq_length}: the model has {model.text_positions} learned positions; give no more"
            )
        model = dataclasses.replace(model, seq_length=seq_length, max_position_embeddings=model.max_positions)
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, **masks))


def how_scored(loaded: LoadedModel, source: SampleSource | None, split: str | None = None) -> Record:
    """What a score depends on beside the weights: `window`, the most tokens of context; `apart`, whether a document
    sees only itself; `reset_position_ids` and `eod_mask_loss`, as in training; of conversations `num_conversations`,
    and how many are longer than the window and `cut` there; of a part of the data its name, `part`, the weights that
    cut it, `split`, and whether these are the default since the model brings none (`default_split`).

    source: None for running text. split: as `open_data_path` has it.
    """
    said: Record = {"window": loaded.config.model.seq_length}
    if split is not None:
        data = loaded.config.data
        known = split not in PARTS or data.split != DataConfig().split or bool(data.data_path or data.lists)
        named = (split, data.split) if split in PARTS else ("valid", split)
        said |= dict(zip(("part", "split"), named, strict=True)) | {"default_split": not known}
    if isinstance(source, Conversations):
        return said | {"apart": True, "num_conversations": source.number, "cut": source.number_cut}
    if source is None:
        return said
    data = loaded.config.data
    ends = {"reset_position_ids": data.reset_position_ids, "eod_mask_loss": data.eod_mask_loss}
    return said | {"apart": data.reset_attention_mask} | ends
