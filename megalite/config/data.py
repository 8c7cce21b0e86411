"""The data section: corpora, their split and blend, and the tokenizer."""

from megalite.config.batch_size import parse_words
from megalite.config.schema import Section, option

TOKENIZERS = (
    "ByteTokenizer",
    "CharTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "NullTokenizer",
)
TOKENIZER_ALIASES = {
    "llama2tokenizer": "SentencePieceTokenizer",
    "gptsentencepiecetokenizer": "SentencePieceTokenizer",
}
"""Other names of them in small letters."""
READS_JSON = (
    "is not here; HuggingFaceTokenizer reads the same tokens from the model's tokenizer.json (`tokenizer_model`)"
)
TOKENIZERS_ELSEWHERE = {
    "tiktokenizer": READS_JSON,
    "llama3tokenizer": READS_JSON,
    "qwentokenizer": READS_JSON,
    "qwen2tokenizer": READS_JSON,
    "multimodaltokenizer": READS_JSON,
    "sfttokenizer": f"{READS_JSON[:-1]}, conversations by tools/preprocess_data.py --data-format chat)",
    "bertwordpiecelowercase": "is BERT's; models here are decoders",
    "bertwordpiececase": "is BERT's; models here are decoders",
    "nullmultimodaltokenizer": "is not here; NullTokenizer takes numbers for text",
}
"""Tokenizers of Megatron-LM and its forks in small letters -> why not, and what to take."""
VOCABULARIES = {"ByteTokenizer": 257, "GPT2BPETokenizer": 50257}
"""Ids of the tokenizers that have the same in every run."""
USUAL_VOCABULARIES = {
    "SentencePieceTokenizer": (32000, "Llama 2's and Mixtral's"),
    "HuggingFaceTokenizer": (128256, "Llama 3's"),
}
"""What a dry run assumes where the tokenizer's file is on another host: ids, and whose number that is."""
WITHOUT_FILE = {
    "tokenizer_model": ("ByteTokenizer", "NullTokenizer"),
    "vocab_file": tuple(name for name in TOKENIZERS if name != "GPT2BPETokenizer"),
    "merge_file": tuple(name for name in TOKENIZERS if name != "GPT2BPETokenizer"),
}
"""Files of tokenizers -> the kinds that read no such file."""
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Fields that name corpora."""
SOURCE = {"one_of": "source of the data"}
OF_A_SPLIT = {**SOURCE, "way": "by split", "stores": True}


class DataConfig(Section):
    """Data come from `.bin/.idx` prefixes, from a raw text or JSONL file, or from a generator (`mock_data`)."""

    data_path: tuple[str, ...] = option(
        (),
        "prefixes of .bin/.idx files (also s3://BUCKET/PREFIX), a text or JSONL file, or weights and prefixes in turn: "
        "0.3 a 0.7 b",
        metavar="PATH",
        stores=True,
        **SOURCE,
    )
    train_data_path: tuple[str, ...] = option((), "as `data_path`, for training only", metavar="PATH", **OF_A_SPLIT)
    valid_data_path: tuple[str, ...] = option((), "as `data_path`, for validation only", metavar="PATH", **OF_A_SPLIT)
    test_data_path: tuple[str, ...] = option(
        (), "as `data_path`, for the final test only", metavar="PATH", **OF_A_SPLIT
    )
    validation_set_names: tuple[str, ...] = option(
        (),
        "names of the paths of `valid_data_path`, in their order: each is evaluated on its own, a line for each",
        metavar="NAME",
        needs="valid_data_path",
    )
    data_args_path: str | None = option(None, "file that holds what `data_path` would", metavar="FILE", **SOURCE)
    data_schedule: str | None = option(
        None,
        "training data that change on the way, files as of `data_args_path`: '0:web.txt 4T:anneal.txt' is web.txt "
        "until 4 trillion tokens are consumed (K, M, B, T), then anneal.txt",
        metavar="STEPS",
        words=True,
        rival="train_data_path",
        **OF_A_SPLIT,
    )
    split: str = option("969,30,1", "parts of `data_path` for training, validation and test", metavar="A,B,C")
    data_cache_path: str | None = option(
        None, "folder of tokenised files and indices; unset: beside `save`, else the user's cache", metavar="DIR"
    )
    mock_data: bool = option(False, "documents drawn from the seed: no file, no tokenizer needed", **SOURCE)
    tokenizer_type: str | None = option(
        None, "tokenizer of the data; unset: bytes for raw text", choices=TOKENIZERS, elsewhere=TOKENIZERS_ELSEWHERE
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json, its directory, or a sentencepiece model", metavar="PATH"
    )
    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    loss_by_part: bool = option(False, "log the loss of each part of the training data beside that of all")
    reset_position_ids: bool = option(False, "positions begin again at 0 after an end of document")
    reset_attention_mask: bool = option(False, "a token sees only its own document")
    eod_mask_loss: bool = option(False, "no loss at positions whose input is an end of document")
    num_workers: int = option(
        2, "threads that prepare batches ahead of each rank; 0: in the training loop", ge=0, le=256
    )

    def stand_in_ids(self, vocab_size: int) -> int | None:
        """How many ids mock data draw from in place of a tokenizer that is named and whose files are not given.

        vocab_size: the flag; 0: not given. None: the tokenizer is read; 0: the number is not known.
        """
        kind, given = self.tokenizer_type, self.tokenizer_model or self.vocab_file or self.merge_file
        if not self.mock_data or given or kind in (None, "ByteTokenizer", "NullTokenizer"):
            return None
        unknown = kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer")
        return vocab_size or (0 if unknown else VOCABULARIES.get(str(kind), VOCABULARIES["ByteTokenizer"]))

    def tokenizer_lacks(self) -> list[str]:
        """Lines about files that a tokenizer of this type is read from, and that are not named."""
        kind = self.tokenizer_type
        if kind not in ("GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer") or self.tokenizer_model:
            return []
        names = ["vocab_file", "merge_file"] if kind == "GPT2BPETokenizer" else ["tokenizer_model"]
        return [f"`tokenizer_type`={kind}: needs `{name}`" for name in names if getattr(self, name) is None]

    def phases(self, seq_length: int) -> tuple[tuple[int, str], ...]:
        """(First sample, file that names the data) of each phase of `data_schedule`; empty without one.

        ValueError for a malformed one (validation reports it)."""
        return () if self.data_schedule is None else parse_words(self.data_schedule, seq_length, "FILE")

    @property
    def lists(self) -> dict[str, str]:
        """Files that hold what `data_path` would -> how messages name them."""
        if self.data_args_path is not None:
            return {self.data_args_path: f"`data_args_path`={self.data_args_path}"}
        try:
            return {word: f"`data_schedule`: {word}" for _, word in self.phases(1)}
        except ValueError:
            return {}
