"""Which tokenizer wrote a `.bin/.idx` pair: PREFIX.tokenizer.json beside it, which Megatron's pairs do not have.

Ids of one tokenizer read by another are a text of nonsense that trains, so whoever opens a pair compares: the files,
and where these differ (GPT-2's pair of files and a tokenizer.json say the same) the ids of a text.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.data.indexed import IndexedDataset
from megalite.data.token_store import WRITTEN_BY
from megalite.data.tokenizer import Tokenizer, tokenizer_fingerprint
from megalite.data.tokenizer_io import description_of, read_description
from megalite.errors import CheckpointError, DataError
from megalite.files import served_url
from megalite.stores import Missing, StoreUrl, place

PROBE = (
    "The quick brown fox jumps over the lazy dog's 1,024 bones; WHY? Naïve Ångström & Привет, мир — 数学とデータ 🙂\n\n"
    "def f(x_0, *args):\n\treturn [x ** 2 for x in range(10)]  # http://example.org/?q=%20\r\n"
    "   indented, electroencephalographically speaking: the the the\n"
)


def note_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Writes the file beside a pair; not of NullTokenizer, for which ids are mere numbers. Raises DataError."""
    if tokenizer.kind != "NullTokenizer":
        named = description_of(tokenizer) | {
            "fingerprint": tokenizer_fingerprint(tokenizer),
            "probe": _probe(tokenizer),
        }
        _write(prefix, json.dumps(named, indent=1) + "\n")


def note_joined(prefix: str, parts: Sequence[str]) -> None:
    """Writes the file beside a pair that pairs were joined to, where all of them have it. Raises DataError."""
    if None not in (found := [_read(part) for part in parts]):
        _write(prefix, str(found[0]))


def check_joined(parts: Sequence[str]) -> None:
    """Raises DataError where two pairs are of two tokenizers."""
    known = {content: part for part in parts if (content := _read(part)) is not None}
    if len(known) > 1:
        first, second, *_ = known.values()
        raise DataError(f"`input`={second}: another tokenizer wrote it than {first}; merge only what one wrote")


def check_tokenizer(store: IndexedDataset, tokenizer: Tokenizer, source: str) -> None:
    """Raises DataError where another tokenizer wrote the pair, or its ids are too many for it. NullTokenizer, by which
    ids are numbers, reads all. source: flag and path of the store."""
    if tokenizer.kind != "NullTokenizer" and (content := _read(store.prefix)) is not None:
        where = store.prefix + WRITTEN_BY
        kind, vocab_size = read_description(content.encode(), where)
        wrote = json.loads(content)
        known = (wrote.get("probe"), vocab_size, wrote.get("eod_id"))
        alike = known[0] is not None and known == (_probe(tokenizer), tokenizer.vocab_size, tokenizer.eod_id)
        if wrote.get("fingerprint") != tokenizer_fingerprint(tokenizer) and not alike:
            raise DataError(
                f"{source}: tokenised by {'another ' * (kind == tokenizer.kind)}{kind} ({vocab_size} ids, end of "
                f"document {wrote.get('eod_id')}), this run has {tokenizer.describe()}; run tools/preprocess_data.py "
                "again with the run's tokenizer, or give the run the one of the data"
            )
    if np.iinfo(store.dtype).max < tokenizer.vocab_size - 1:
        raise DataError(
            f"{store.prefix}.idx: dtype {store.dtype.name} cannot hold the {tokenizer.vocab_size} ids of "
            f"{tokenizer.kind}; run tools/preprocess_data.py again with this tokenizer"
        )


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give the same ids to a text; further ids at the end are no difference."""
    known = _probe(one)
    return tokenizer_fingerprint(one) == tokenizer_fingerprint(other) or (known is not None and known == _probe(other))


def _probe(tokenizer: Tokenizer) -> list[int] | None:
    """The ids of a text; None of a tokenizer that does not know all of its characters."""
    try:
        return tokenizer.encode(PROBE)
    except DataError:
        return None


def _read(prefix: str) -> str | None:
    """The file beside a pair, None where there is none; under a URL by one request. Raises DataError."""
    path = prefix + WRITTEN_BY
    try:
        if served_url(prefix) is None:
            return Path(path).read_text() if Path(path).is_file() else None
        url = place(path)
        assert isinstance(url, StoreUrl)
        return url.store.read(url.key).decode()
    except Missing:
        return None
    except CheckpointError as error:  # a store's
        raise DataError(error.text) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it, or write the pair again") from None


def _write(prefix: str, content: str) -> None:
    try:
        Path(prefix + WRITTEN_BY).write_text(content)
    except OSError as error:
        raise DataError(f"{prefix}{WRITTEN_BY}: cannot be written ({error.strerror}); make room") from None
