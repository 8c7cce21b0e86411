"""A part of a corpus as tokens, kept in a cache whose key is content, tokenizer and split.

The work is that of `preprocess`: a process that is killed after hours leaves hours of work to the next one.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from megalite.data.cache import cached_folder, digest_of
from megalite.data.corpus import SplitRange, TextCorpus
from megalite.data.file_chunks import document_units, utf8_length
from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import Totals, UnitJob, write_units
from megalite.data.splits import UnusableSplit, without
from megalite.data.tokenizer import Tokenizer, tokenizer_fingerprint
from megalite.errors import DataError
from megalite.progress import ProgressBar

logger = logging.getLogger(__name__)

CACHE_VERSION = 1


def tokenise_corpus(
    corpus: TextCorpus, part: SplitRange | None, split: str, tokenizer: Tokenizer, cache_dir: Path
) -> IndexedDataset:
    """Tokens of one part of a corpus, from the cache if they are there.

    part: fractions `(from, to)` of the split; None: the whole corpus.
    Raises UnusableSplit where the part holds no text, DataError where the tokenizer does not know it.
    """
    tokenised_by, part_of = tokenizer_fingerprint(tokenizer), split if part else None
    key = digest_of("tokens", CACHE_VERSION, corpus.digest(), tokenised_by, part, part_of, corpus.ends_documents)
    job = UnitJob(tokenizer, ("text",), corpus.ends_documents and tokenizer.eod_id is not None, skip_bad_lines=False)

    def write(folder: Path) -> None:
        logger.info("tokenising the %s part of %s with %s", split, corpus.name, tokenizer.describe())
        documents = list(corpus.documents(part, split))  # so it is known how much there is to do
        totals = Totals(sum(map(utf8_length, documents)))
        units = document_units(documents, cuts=tokenizer.splits_at_newline)
        with ProgressBar("tokenising", "B") as bar:
            write_units(job, units, [str(folder / "text_document")], totals, on_progress=bar)
        (folder / "utf8_bytes").write_text(str(totals.size if totals.tokens else 0))

    def tokens() -> Path:
        folder = cached_folder(cache_dir / "tokens", key, write, resumes=True)
        if (folder / "utf8_bytes").read_text() == "0":
            raise UnusableSplit(
                f"--data-path={corpus.name}: the {split} split is empty (0 tokens); "
                f"give it more in --split, or {without(split)}"
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
