"""From the data section to the three splits: the one entry of this room."""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megalite.config import DataConfig
from megalite.data.blend import BlendedDataset, BlendParts, PhasedDataset, normalise, parse_blend, samples_per_part
from megalite.data.cache import cache_directory, cached_folder, digest_of
from megalite.data.corpus import SplitRange, TextCorpus, file_corpus, stdlib_corpus
from megalite.data.file_chunks import document_units, utf8_length
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset, is_indexed, strip_suffix
from megalite.data.preprocess import Totals, UnitJob, write_units
from megalite.data.remote_tokens import AT_ONCE, RemoteIndexedDataset
from megalite.data.splits import SPLIT_NAMES, Source, UnusableSplit, apart, bounds_of, parse_split, sources_of, without
from megalite.data.survey import WHOLE, Phase, Survey, check_answers, check_vocabulary, survey, unanswered
from megalite.data.token_store import MockStore, TokenStore
from megalite.data.tokenizer import NullTokenizer, Tokenizer, tokenizer_fingerprint
from megalite.data.tokenizer_io import tokenizer_from_config
from megalite.data.written_by import check_tokenizer
from megalite.errors import DataError
from megalite.files import served_url
from megalite.progress import ProgressBar

logger = logging.getLogger(__name__)

TOKENS_VERSION = 1
"""Changes when cached tokens of the same text and tokenizer would differ."""

Dataset = GPTDataset | BlendedDataset


@dataclass(frozen=True)
class Datasets:
    """The splits of a run; None where a split is not used."""

    train: Dataset | PhasedDataset | None
    valid: Dataset | None
    test: Dataset | None
    # Totals of training samples asked for so far: a checkpoint stores them, and a resumed run hands them back as
    # `earlier_requests`, so that it keeps its order.
    train_requests: tuple[int, ...]
    surveys: Mapping[str, Sequence[Survey]]  # of each split, which data it reads
    phases: tuple[Phase, ...] = ()  # of `--data-schedule`; surveys and requests are then of the first
    valid_sets: Mapping[str, Dataset] = field(default_factory=dict)  # of `--validation-set-names`, in place of `valid`
    blend_parts: BlendParts | None = None  # of `train`, with `--loss-by-part`
    talks: tuple[int, int] = (0, 0)  # training conversations, each epoch counted: (a sample ends inside of them, all)


def build_tokenizer(cfg: DataConfig, *, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a run. Unset, it is bytes for raw text, numbers for `--mock-data`; token files need it named.
    With `--mock-data` numbers take the place of a tokenizer whose files are not given.

    Raises DataError where it cannot be made, or is not named where it must be.
    """
    if stand_in := cfg.stand_in_ids(vocab_size or 0):
        return NullTokenizer(stand_in)
    files = [path for source in sources_of(cfg).values() for path in parse_blend(source.words, source.flag)[0]]
    raw = [path for path in dict.fromkeys(files) if not is_indexed(strip_suffix(path))]
    named = cfg.tokenizer_type or cfg.tokenizer_model or cfg.vocab_file or cfg.merge_file
    if not named and files and len(raw) < len(set(files)):
        if vocab_size is None:
            raise DataError(
                "`tokenizer_type`: not given, and token files do not hold the tokenizer that wrote them; "
                "name it, or NullTokenizer with `vocab_size`"
            )
        return tokenizer_from_config(cfg, vocab_size=vocab_size, default="NullTokenizer")

    def texts() -> Iterator[str]:
        for corpus in [_open_raw(path, "`data_path`") for path in raw] if files else [stdlib_corpus()]:
            yield from corpus.documents(None, "train")

    has_text = not cfg.mock_data and (not files or bool(raw))
    default = "NullTokenizer" if cfg.mock_data and vocab_size is not None else "ByteTokenizer"
    return tokenizer_from_config(cfg, vocab_size=vocab_size, texts=texts if has_text else None, default=default)


def build_datasets(
    cfg: DataConfig,
    *,
    seq_length: int,
    train_samples: int | None,
    valid_samples: int | None,
    test_samples: int | None,
    seed: int,
    tokenizer: Tokenizer,
    cache_dir: Path | None,
    earlier_requests: Sequence[tuple[int, ...]] = (),
    vocab_size: int | None = None,
    ranks_here: int = 1,
    warns: bool = True,
) -> Datasets:
    """Open the data of a run. Raises DataError for whatever is missing, damaged, empty or too small.

    train_samples, valid_samples, test_samples: samples that the run reads in all; 0: the split is not used; None: one
        epoch.
    cache_dir: `cache_directory(...)`.
    earlier_requests: `Datasets.train_requests` of the checkpoint that is resumed, and of its further phases that have
        begun.
    vocab_size: ids that the model knows, if more than the tokenizer's.
    ranks_here: of this host; they share the requests that a host sends to a store at once.
    warns: log what is remarkable about the data; one of several ranks does.
    """
    known = max(vocab_size or 0, tokenizer.vocab_size)
    opener = _Opener(cfg, seq_length, seed, tokenizer, cache_dir, known, ranks_here)
    requests, phases = earlier_requests[0] if earlier_requests else (), tuple[Phase, ...]()
    train: Dataset | PhasedDataset | None = None
    if cfg.data_schedule is not None and train_samples is not None and train_samples > 0:
        train, phases = opener.phases(train_samples, earlier_requests)
        requests = phases[0].requests
    elif train_samples != 0:
        requests = _with_request(requests, train_samples)
        train = opener.split("train", requests or (None,))
    parts = BlendParts(train) if cfg.loss_by_part and train is not None else None
    sets = cfg.validation_set_names if valid_samples != 0 else ()
    named = {
        name: opener.split("valid", (valid_samples,), apart("valid", (path,)))
        for name, path in zip(sets, cfg.valid_data_path, strict=False)
    }
    valid = opener.split("valid", (valid_samples,)) if valid_samples != 0 and not named else None
    test = None
    if test_samples != 0 and opener.has("test"):
        try:
            test = opener.split("test", (test_samples,))
        except UnusableSplit as error:
            # The default split leaves a sliver for the test; a small corpus has none, which is no fault of the user.
            if warns:
                logger.warning("no final test: %s", error)
    if warns:
        opener.warn_of_documents()
    surveys = {split: found for split, found in opener.surveys().items() if split in SPLIT_NAMES}
    return Datasets(train, valid, test, requests, surveys, phases, named, parts, opener.talks)


def _with_request(earlier: tuple[int, ...], samples: int | None) -> tuple[int, ...]:
    """Totals asked for, `samples` among them if it exceeds those before; None asks for one epoch."""
    return earlier if samples is None or (earlier and samples <= max(earlier)) else (*earlier, samples)


@dataclass
class _Opener:
    """Opens each corpus once for all splits. vocab_size: ids that the model knows."""

    cfg: DataConfig
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    cache_dir: Path | None
    vocab_size: int
    ranks_here: int = 1

    def __post_init__(self) -> None:
        self.sources = sources_of(self.cfg)
        self._stores: dict[str, IndexedDataset] = {}
        self._used: dict[str, dict[str, TokenStore]] = {}
        self._surveys: dict[int, Survey] = {}
        self.talks = (0, 0)
        self._phase = 0  # of the training data that are being opened

    def has(self, split: str) -> bool:
        """Whether any data are meant for the split; the default corpus has no test part."""
        if self.cfg.mock_data:
            return parse_split(self.cfg.split)[SPLIT_NAMES.index(split)] is not None
        if not self.sources:
            return split != "test"
        return split in self.sources and self.sources[split].part is not None

    def surveys(self) -> dict[str, list[Survey]]:
        """Surveys the stores of every split that was opened, in the order of the blend."""
        known = self._surveys
        for source, store in (pair for stores in self._used.values() for pair in stores.items()):
            if id(store) not in known:
                known[id(store)] = survey(store, source)
        return {split: [known[id(store)] for store in stores.values()] for split, stores in self._used.items()}

    def phases(self, samples: int, earlier: Sequence[tuple[int, ...]]) -> tuple[PhasedDataset, tuple[Phase, ...]]:
        """Training data of `--data-schedule` for `samples` samples. earlier: requests of the phases that have begun."""
        steps, made, phases = self.cfg.phases(self.seq_length), [], []
        planned = zip(steps, PhasedDataset.asked_of(steps, samples), strict=True)
        for self._phase, ((first, name), asked) in enumerate(planned):
            requests = _with_request(earlier[self._phase] if self._phase < len(earlier) else (), asked)
            made.append((first, self.split("train", requests)))
            source = self.sources[self._key("train")]
            weights, own = parse_blend(source.words, source.flag)[1], tuple(self.surveys()[self._key("train")])
            phases.append(Phase(first, name, tuple(normalise(weights)) if weights else (), requests, own))
        self._phase = 0
        return PhasedDataset(made), tuple(phases)

    def warn_of_documents(self) -> None:
        """Names the training data with conversations that teach nothing (of very large data their maker did), or with
        documents that no sample can hold whole."""
        trained = [stores for key, stores in self._used.items() if key.startswith("train")]
        for source, store in (pair for stores in trained for pair in stores.items()):
            small = int(store.lengths.sum(dtype=np.int64)) <= WHOLE
            if small and (count := unanswered(store)):
                logger.warning(
                    "%s: conversations without an answer of the assistant, of which nothing is learnt: %s of %s",
                    source, f"{count:,}", f"{len(store.lengths):,}",
                )  # fmt: skip
            longer = int((store.lengths > self.seq_length).sum())
            if longer and self.cfg.reset_attention_mask:
                logger.warning(
                    "%s: %s of %s documents are longer than `seq_length`=%d (the longest has %s tokens): they are cut, "
                    "and with `reset_attention_mask` none sees the one before; raise `seq_length` to keep them whole",
                    source, f"{longer:,}", f"{len(store.lengths):,}", self.seq_length, f"{int(store.lengths.max()):,}",
                )  # fmt: skip

    def split(self, split: str, requests: Sequence[int | None], source: Source | None = None) -> Dataset:
        """Data set of one split, by its totals of samples. source: None: the split's own."""
        if self.cfg.mock_data:
            mock = MockStore(seed=self.seed, vocab_size=self.vocab_size, eod_id=self.tokenizer.eod_id)
            part = parse_split(self.cfg.split)[SPLIT_NAMES.index(split)]
            self._note(split, "`mock_data`", mock)
            return self._dataset(mock, bounds_of(part, len(mock.lengths)), split, requests)
        if not self.sources:
            store = self._tokens("", (0.0, 1.0), split, "`data_path`")
            self._note(split, f"`data_path` ({store.name})", store)
            return self._dataset(store, (0, len(store)), split, requests)
        source = source or self.sources.get(self._key(split))
        if source is None:
            raise UnusableSplit(f"`{split}_data_path`: not given; name data for it, or {without(split)}")
        if source.part is None:
            raise UnusableSplit(
                f"`split`={self.cfg.split}: the {split} split is empty (weight 0); give it more, or {without(split)}"
            )
        paths, weights = parse_blend(source.words, source.flag)
        opened = [self._open(path, source, split) for path in paths]
        if len(paths) == 1 and weights is None:
            return self._dataset(*opened[0], split, requests)
        return self._blend(opened, weights, split, requests)

    def _blend(
        self,
        opened: Sequence[tuple[TokenStore, tuple[int, int]]],
        weights: list[float] | None,
        split: str,
        requests: Sequence[int | None],
    ) -> Dataset:
        if weights is None:
            # By size: one epoch of each is enough for Megatron; a longer run repeats them in the same proportion.
            once = [self._dataset(store, bounds, split, (None,)) for store, bounds in opened]
            weights = [float(len(part)) for part in once]
            total = sum(len(part) for part in once)
            if requests[0] is None or (len(requests) == 1 and requests[0] <= total):
                return BlendedDataset(once, weights, requests[0] or total, cache_dir=self.cache_dir)
        # Megatron normalises here and once more in the blend itself, which may move the last bit.
        weights = normalise(weights)
        assert requests[0] is not None or len(requests) == 1
        if requests[0] is None:
            # no part is read more than once
            tokens = [int(store.lengths[begin:end].sum(dtype=np.int64)) for store, (begin, end) in opened]
            samples = [int((n - 1) // self.seq_length / w) for n, w in zip(tokens, weights, strict=True) if w]
            requests = (max(1, min(samples)),)
        sizes = [request for request in requests if request is not None]
        asked = [samples_per_part(weights, size) for size in sizes]
        parts = [
            self._dataset(store, bounds, split, [one[number] for one in asked])
            for number, (store, bounds) in enumerate(opened)
        ]
        size = sum(samples_per_part(weights, sizes[-1], 0.0))
        return BlendedDataset(parts, weights, size, cache_dir=self.cache_dir)

    def _dataset(
        self, store: TokenStore, bounds: tuple[int, int], split: str, requests: Sequence[int | None]
    ) -> GPTDataset:
        try:
            check_answers(store, *bounds)
            made = GPTDataset(
                store,
                *bounds,
                seq_length=self.seq_length,
                requests=requests,
                seed=(self.seed + PhasedDataset.SEED_STEP * self._phase) % 2**32,
                split=split,
                cache_dir=self.cache_dir,
                vocab_size=self.vocab_size,
                tokenizer=self.tokenizer.kind,
            )
            if split == "train" and store.marks is not None:
                cut, number = made.documents_cut()
                self.talks = self.talks[0] + cut, self.talks[1] + number
            return made
        except DataError as error:
            raise UnusableSplit(str(error)) from None

    def _note(self, split: str, source: str, store: TokenStore) -> None:
        self._used.setdefault(self._key(split), {})[source] = store

    def _key(self, split: str) -> str:
        return f"{split} {self._phase}" if self._phase else split

    def _open(self, path: str, source: Source, split: str) -> tuple[TokenStore, tuple[int, int]]:
        if path.endswith((".bin", ".idx")) or is_indexed(path) or not os.path.isfile(path):
            if path not in self._stores:
                self._stores[path] = self._indexed(path, source.flag)
            store = self._stores[path]
            bounds = bounds_of(source.part, len(store))
        else:
            store = self._tokens(path, None if source.whole else source.part, split, source.flag)
            bounds = 0, len(store)
        self._note(split, f"{source.flag}={path}", store)
        return store, bounds

    def _indexed(self, path: str, flag: str) -> IndexedDataset:
        if os.path.isdir(path) and not is_indexed(path):
            raise DataError(f"{flag}={path}: is a folder; name a text file in it, or the prefix of a .bin/.idx pair")
        if served_url(path) is None:
            store = IndexedDataset(path, flag=flag)
        else:
            cache = (self.cache_dir or cache_directory(None, None)) / "objects"
            store = RemoteIndexedDataset(path, cache, max(1, AT_ONCE // self.ranks_here), flag=flag)
        check_tokenizer(store, self.tokenizer, f"{flag}={path}")
        check_vocabulary(store, self.vocab_size, self.tokenizer.kind, f"{flag}={path}")
        return store

    def _tokens(self, path: str, part: SplitRange | None, split: str, flag: str) -> IndexedDataset:
        """Tokens of raw text; path "" is the default corpus."""
        corpus = _open_raw(path, flag) if path else stdlib_corpus()
        assert self.cache_dir is not None, "raw text needs a cache folder"
        return tokenise_corpus(corpus, part, split, self.tokenizer, self.cache_dir)


def _open_raw(path: str, flag: str) -> TextCorpus:
    if not os.path.exists(path):
        raise DataError(
            f"{flag}={path}: no such file, and {path}.idx not found; name a text file or run tools/preprocess_data.py"
        )
    if os.path.isdir(path):
        raise DataError(f"{flag}={path}: is a folder; name a text file in it, or the prefix of a .bin/.idx pair")
    return file_corpus(path, flag)


def tokenise_corpus(
    corpus: TextCorpus, part: SplitRange | None, split: str, tokenizer: Tokenizer, cache_dir: Path
) -> IndexedDataset:
    """Tokenises one part of a corpus, unless the cache holds its tokens. What a killed process has done is kept.

    part: fractions `(from, to)` of the split; None: the whole corpus.
    Raises UnusableSplit where the part holds no text, DataError where the tokenizer does not know it.
    """
    tokenised_by = tokenizer_fingerprint(tokenizer)
    of = split if part else None
    key = digest_of("tokens", TOKENS_VERSION, corpus.digest(), tokenised_by, part, of, corpus.ends_documents)
    job = UnitJob(tokenizer, ("text",), corpus.ends_documents and tokenizer.eod_id is not None, skip_bad_lines=False)

    def write(folder: Path) -> None:
        logger.info("tokenising the %s part of %s with %s", split, corpus.name, tokenizer.describe())
        documents = list(corpus.documents(part, split))  # so it is known how much there is to do
        totals = Totals((str(folder / "text_document"),), sum(map(utf8_length, documents)))
        units = document_units(documents, cuts=tokenizer.splits_at_newline)
        with ProgressBar("tokenising", "B") as bar:
            write_units(job, units, totals, on_progress=bar)
        (folder / "utf8_bytes").write_text(str(totals.size if totals.tokens else 0))

    def tokens() -> Path:
        folder = cached_folder(cache_dir / "tokens", key, write, resumes=True)
        if (folder / "utf8_bytes").read_text() == "0":
            raise UnusableSplit(
                f"`data_path`={corpus.name}: the {split} split is empty (0 tokens); "
                f"give more text or a larger part in `split`, or {without(split)}"
            )
        return folder / "text_document"

    prefix = tokens()
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        logger.warning("%s; tokenising again", error)
        shutil.rmtree(prefix.parent)
        dataset = IndexedDataset(tokens())
    dataset.name = corpus.name
    return dataset
