"""A Hugging Face model on disk: config.json, safetensors, tokenizer, generation_config.json.

model.safetensors                       one file, or
model-00001-of-00003.safetensors ...    several and model.safetensors.index.json: {"weight_map": {name: file}}
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint import check_file_name, parse_json
from megalite.config import Config, FurtherTokens
from megalite.convert.family import HuggingFaceFamily, TensorPair
from megalite.convert.hf_tokenizer import generation_config, special_tokens, write_tokenizer
from megalite.convert.model_card import CARD, model_card
from megalite.convert.origin import Origin
from megalite.convert.quantized import Quantized, quantized_tensors
from megalite.convert.registry import config_of_weights, read_model, source_and_family
from megalite.convert.source import ForeignModel, ModelSource, converted, staged, stored_shapes
from megalite.errors import CheckpointError
from megalite.files import hub_advice

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TEXT = "model.language_model."
MAX_JSON_BYTES = 64 * 2**20
MAX_SHARD_ELEMENTS = 1 << 29  # 2 GiB in fp32: the memory that writing takes
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@contextmanager
def safetensors(path: Path, wrong: str = "cannot be read") -> Iterator[Any]:
    """The open file. Raises CheckpointError, which says what is `wrong`."""
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {wrong} ({str(error)[:120]})") from None


class HuggingFaceSource(ForeignModel):
    """A Hugging Face directory, read tensor by tensor.

    Raises ConfigError for a model that we do not have, CheckpointError for files that are missing, damaged or hostile.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = self.home = Path(directory)
        if not self.directory.exists() and (advice := hub_advice(str(directory))):
            raise CheckpointError(f"{directory}: no such directory; {advice}")
        if self.directory.is_file():
            raise CheckpointError(f"`load`={directory}: is a file; give its folder, {self.directory.parent}")
        raw = read_json(self.directory / CONFIG)
        self.family, self.model = read_model(raw, CONFIG)
        generation = self.directory / GENERATION
        self.origin = Origin.of_folder(self.directory, raw, read_json(generation) if generation.exists() else None)
        self._files = self._where_tensors_are()
        if self.family.stacked and any(name.endswith(".experts.gate_up_proj") for name in self._files):
            self.family = replace(self.family, rules=(*self.family.rules, *self.family.stacked))
        further = f"model.layers.{self.model.num_layers}."
        if self.model.further.depth and not any(name.startswith(further) for name in self._files):
            self.model = replace(self.model, further=FurtherTokens())  # config.json speaks of layers that are not there
        self._quantized: dict[str, Quantized] = {}
        if settings := raw.get("quantization_config"):
            self._quantized = quantized_tensors(settings, self._files, CONFIG)
        self._pairs = {pair.ours: pair for pair in self.family.pairs(self.model)}
        self._shapes = stored_shapes(self.model)
        self._check_names()

    @property
    def config(self) -> Config:
        """A configuration that describes the weights. Raises CheckpointError."""
        with self._entry(self._pairs["embedding.word_embeddings.weight"].theirs[0], tuple(DTYPES)) as (header, _, _):
            return config_of_weights(self.model, getattr(torch, DTYPES[header.get_dtype()]))

    def read(self, name: str) -> Tensor:
        pair, shape = self._pairs[name], self._shapes[name]
        values = pair.form.to_ours(self.model, [self._tensor(*part) for part in pair.parts(self.model, shape)])
        for copy in pair.copies:
            if copy in self._files and not torch.equal(self._tensor(copy, shape), values):
                raise CheckpointError(f"{self.directory}: {copy} is not {pair.theirs[0]}; here they are one tensor")
        return values

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._quantized:
            return self._stored(name, shape, tuple(DTYPES))
        stored = self._quantized[name]
        parts = [self._stored(part, None, (dtype,)) for part, dtype in zip(stored.parts, stored.dtypes, strict=True)]
        try:
            whole = stored.decode(*parts)
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: {name}: {error}") from None
        if tuple(whole.shape) != shape:
            raise CheckpointError(f"{self.directory}: {name}: shape {list(whole.shape)}, {CONFIG} says {list(shape)}")
        return whole

    def _stored(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> Tensor:
        """A tensor as it is in a file; shape: None: any."""
        with self._entry(name, dtypes) as (header, where, values):
            if (found := tuple(header.get_shape())) != shape and shape is not None:
                raise CheckpointError(f"{where}: shape {list(found)}, {CONFIG} says {list(shape)}")
            return values()

    @contextmanager
    def _entry(self, name: str, dtypes: tuple[str, ...]) -> Iterator[tuple[Any, str, Callable[[], Tensor]]]:
        """(Header of a tensor in an open file, where that is, what reads its values). Raises CheckpointError."""
        file, stored_name = self._files[name]
        where = f"{self.directory / file}: {stored_name}"
        with safetensors(self.directory / file) as opened:
            header = opened.get_slice(stored_name)
            if header.get_dtype() not in dtypes:
                raise CheckpointError(f"{where}: dtype {header.get_dtype()} ({', '.join(dtypes)})")
            yield header, where, lambda: opened.get_tensor(stored_name)

    def _where_tensors_are(self) -> dict[str, tuple[str, str]]:
        """Full name -> (file, name in the file), from the files' own headers."""
        table: dict[str, tuple[str, str]] = {}
        for file in self._weight_files():
            with safetensors(self.directory / file, "not a safetensors file") as opened:
                table |= {name: (file, name) for name in opened.keys()}  # noqa: SIM118  not a mapping
        if any(name.startswith(TEXT) for name in table):  # a model for images, too
            apart = sorted(name for name in table if name.startswith("model.") and not name.startswith(TEXT))
            table = {name.replace(TEXT, "model.", 1): table[name] for name in table.keys() - {*apart}}
            if apart:
                logger.warning("%s: %d tensors for images are left out", self.directory, len(apart))
        prefix = self.family.prefix
        if any(name.startswith(prefix) for name in table):
            return table
        output = next(rule.theirs[0] for rule in self.family.rules if rule.ours == "head.output") + ".weight"
        return {name if name == output else prefix + name: place for name, place in table.items()}

    def _further_layers(self) -> set[str]:
        """Tensors of layers behind the last one, which are left out."""
        numbers = {name: re.match(r"(?:model\.layers\.(\d{1,6})|mtp)\.", name) for name in self._files}
        last = self.model.num_layers + self.model.further.depth if self.family.predicts else 10**6
        found = {name for name, match in numbers.items() if match is not None and int(match[1] or 10**6) >= last}
        if found:
            logger.warning(
                "%s: %d tensors of layers from %d on, which predict further tokens, are left out",
                self.directory, len(found), last,
            )  # fmt: skip
        return found

    def _weight_files(self) -> list[str]:
        if (self.directory / INDEX).is_file():
            index = self.directory / INDEX
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, Mapping) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index}: weight_map is not a table of file names")
            files = [check_file_name(file, str(index)) for file in sorted(set(weight_map.values()))]
            if gone := [file for file in files if not (self.directory / file).exists()]:
                raise CheckpointError(f"{self.directory}: {INDEX} names {_some(gone)}, missing there; copy all files")
            return files
        if (self.directory / SINGLE).is_file():
            return [SINGLE]
        if shards := sorted(path.name for path in self.directory.glob("model-*-of-*.safetensors")):
            raise CheckpointError(f"{self.directory}: holds {_some(shards)}, but no {INDEX}; copy it there")
        pickled = sorted(path.name for path in self.directory.glob("*.bin"))
        hint = f" ({pickled[0]} is a pickle, which is not read; save the model as safetensors)" if pickled else ""
        raise CheckpointError(f"{self.directory}: neither {SINGLE} nor {INDEX} found{hint}")

    def _check_names(self) -> None:
        whole = {name for pair in self._pairs.values() for name in pair.theirs}
        wanted = {
            part for name in whole for part in (self._quantized[name].parts if name in self._quantized else (name,))
        }
        if missing := sorted(wanted - self._files.keys()):
            raise CheckpointError(f"{self.directory}: tensors are missing: {_some(missing)}")
        known = self.family.ignored
        if not self.model.untie_embeddings_and_output_weights:
            known = (*known, "lm_head.weight", "embed_out.weight")  # a stored copy of the tied embedding
        beyond = self._further_layers() | {copy for pair in self._pairs.values() for copy in pair.copies}
        if unexpected := sorted(name for name in self._files.keys() - wanted - beyond if not name.endswith(known)):
            raise CheckpointError(f"{self.directory}: a {self.family.name} of this {CONFIG} has no {_some(unexpected)}")


def write_huggingface(
    source: ModelSource, directory: Path, *, dtype: torch.dtype | None = None, base: str | None = None
) -> Path:
    """A directory that transformers loads and the Hub takes, with tokenizer and model card; returns it.

    dtype: of the stored weights; None keeps each as it is. base: hub id of the model that the training began with;
    None: the one that is recorded, if any. Raises ConfigError where no family is this model,
    CheckpointError where it cannot be written.
    """
    source, family = source_and_family(source)
    model = source.model
    special = special_tokens(source.origin, source.tokenizer)
    with staged(directory, model=model, dtype=dtype) as staging:
        stored = _write_weights(source, family, staging, dtype)
        config = {
            **family.config(model),
            **special,
            "dtype": stored,
            "torch_dtype": stored,
            **({"transformers_version": version} if (version := source.origin.transformers_version) else {}),
        }
        write_json(staging / CONFIG, config)
        write_json(staging / GENERATION, generation_config(source.origin, source.tokenizer))
        write_tokenizer(source.tokenizer, staging)
        base = base or source.origin.hub_id
        card = model_card(model, family.name, source.origin, source.facts, base, adapters=False)
        (staging / CARD).write_text(card, encoding="utf-8")
    return directory


def _write_weights(source: ModelSource, family: HuggingFaceFamily, staging: Path, dtype: torch.dtype | None) -> str:
    """All tensors shard by shard; returns the dtype of the embedding in transformers' word."""
    shards = list(_shards(source, family))
    weight_map: dict[str, str] = {}
    total = 0
    first = None
    for number, pairs in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for pair in pairs:
            values = converted(pair.ours, source.read(pair.ours), dtype)
            parts = pair.form.to_theirs(source.model, values)
            tensors |= {name: _alone(part) for name, part in zip(pair.theirs, parts, strict=True)}
            tensors |= {name: parts[0].clone() for name in pair.copies}
        save_file(tensors, staging / file, metadata={"format": "pt"})
        first = first or next(iter(tensors.values())).dtype
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return str(first).removeprefix("torch.")


def _alone(part: Tensor) -> Tensor:
    """Contiguous, with memory of its own: safetensors refuses tensors that share it."""
    shares = part.untyped_storage().nbytes() > part.nbytes
    return part.clone(memory_format=torch.contiguous_format) if shares else part.contiguous()


def _shards(source: ModelSource, family: HuggingFaceFamily) -> Iterator[list[TensorPair]]:
    """Tensors in the order of the model, cut where a file would become too large."""
    shapes = stored_shapes(source.model)
    pairs: list[TensorPair] = []
    held = 0
    for pair in family.pairs(source.model):
        size = torch.Size(shapes[pair.ours]).numel()
        if pairs and held + size > MAX_SHARD_ELEMENTS:
            yield pairs
            pairs, held = [], 0
        pairs.append(pair)
        held += size
    yield pairs


def read_json(path: Path) -> dict[str, Any]:
    """An object in a small file. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: more than {MAX_JSON_BYTES} bytes; not what it is named")
        found = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); is it a Hugging Face model?") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
