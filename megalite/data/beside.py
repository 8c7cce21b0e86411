"""Files beside a tokenizer's own: they decide no id, and whoever uses the model elsewhere needs them.

    chat_template.jinja, additional_chat_templates/NAME.jinja     how a conversation is written
    special_tokens_map.json, tokenizer_config.json, ...           names of special tokens
    tokenizer.model, vocab.json, merges.txt                       the same ids in another form

A checkpoint keeps them in one folder: there `additional_chat_templates.NAME.jinja` stands for the file of that folder.
"""

import logging
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from megalite.data.hostile_tokenizer import MOST_BYTES
from megalite.errors import DataError
from megalite.strangers import read_limited

logger = logging.getLogger(__name__)

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
#: Longer than any template by far, and read whole.
MOST_TEMPLATE = 1 << 20
MOST_TEMPLATES = 64
NAMES = (
    TEMPLATE,
    "special_tokens_map.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_MORE = re.compile(rf"{MORE_TEMPLATES}[./]([A-Za-z0-9_-]+\.jinja)")


def files_beside(folder: Path, but: Container[str] = ()) -> dict[str, bytes]:
    """Name in a checkpoint -> content of the files beside the tokenizer in `folder`. but: names that are left out.

    A link that leads out of the folder is left out with a warning: what it names is not the tokenizer maker's to give
    away. Raises DataError for a file that cannot be read, or is larger than any of its kind.
    """
    found = {}
    for path in _paths(folder):
        inside = path.relative_to(folder).as_posix()
        name = inside.replace("/", ".")
        if name in but:
            continue
        if not _stays(path, folder):
            logger.warning("%s: is a link out of its folder; it is left out", path)
            continue
        template = path.suffix == ".jinja"
        found[name] = read_limited(path, "`tokenizer_model`", MOST_TEMPLATE if template else MOST_BYTES)
    return found


def _paths(folder: Path) -> Iterator[Path]:
    yield from (folder / name for name in NAMES if (folder / name).exists())
    more = [*folder.glob(f"{MORE_TEMPLATES}/*.jinja"), *folder.glob(f"{MORE_TEMPLATES}.*.jinja")]
    if len(more) > MOST_TEMPLATES:
        raise DataError(
            f"`tokenizer_model`={folder}: {len(more)} files in {MORE_TEMPLATES}, {MOST_TEMPLATES} at most; remove some"
        )
    for path in sorted(more):
        if _MORE.fullmatch(path.relative_to(folder).as_posix()):
            yield path
        else:
            logger.warning("%s: its name has more than letters, digits, _ and -; it is left out", path)


def _stays(path: Path, folder: Path) -> bool:
    """Whether a file lies in its folder, or in the store of files that the folders of Hugging Face's cache link to."""
    target, home = path.resolve(), folder.resolve()
    stores = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    return any(target.is_relative_to(store) for store in stores)


def as_hugging_face(beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same files under the names that transformers looks for."""
    return {_MORE.sub(rf"{MORE_TEMPLATES}/\1", name): content for name, content in beside.items()}
