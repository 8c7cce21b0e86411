"""What a Hugging Face folder says of tokens, templates and sampling is there again after our checkpoint and export."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.convert import (
    CheckpointSource,
    HuggingFaceSource,
    Origin,
    open_megatron,
    write_checkpoint,
    write_huggingface,
    write_megatron,
    write_torch_dist,
)
from megalite.convert.hf_tokenizer import generation_config, huggingface_files, special_tokens
from megalite.convert.origin import hub_id_of
from megalite.data import ByteTokenizer, NullTokenizer, load_tokenizer, make_tokenizer, tokenizer_files
from megalite.data.tokenizer import tokenizer_fingerprint
from megalite.errors import CheckpointError, DataError
from tests.unit.convert.chat_model import SAMPLING, TALK, TEMPLATE, save_model, save_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
RAISES = "{{ raise_exception('no') }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder)
    save_tokenizer(folder)
    return folder


def round_trip(source: Path, where: Path) -> Path:
    write_checkpoint(HuggingFaceSource(source), where / "ours")
    return write_huggingface(CheckpointSource(where / "ours"), where / "export")


# Entries of config.json and of generation_config.json; None: there is no such file.
SPECIALS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    (dict(eos_token_id=297), dict(eos_token_id=[298, 297])),
    (dict(eos_token_id=[298, 297]), dict(eos_token_id=[298, 297], **SAMPLING)),
    (dict(eos_token_id=[298, 297]), None),
    (dict(bos_token_id=None, eos_token_id=298), dict(bos_token_id=None, eos_token_id=298)),
    (dict(bos_token_id=300, eos_token_id=[298]), dict(bos_token_id=300, eos_token_id=[298])),
    (dict(bos_token_id=0, eos_token_id=0, pad_token_id=0), dict(eos_token_id=0)),
    (dict(eos_token_id=None), dict(eos_token_id=[297, 298, 299, 300])),
    (dict(eos_token_id=None, pad_token_id=None), None),
    ({}, None),
    ({}, {}),
    ({}, dict(temperature=0.7)),
    (dict(pad_token_id=-1), dict(pad_token_id=-1)),
    (dict(eos_token_id=297), dict(do_sample=False, max_new_tokens=64)),
    (dict(eos_token_id=297), dict(do_sample=True, min_p=0.05, typical_p=0.9, stop_strings=["User:"])),
    (dict(eos_token_id=297), dict(num_beams=4, length_penalty=0.6, early_stopping=True)),
    (dict(eos_token_id=297), dict(suppress_tokens=[1, 2], begin_suppress_tokens=[3], bad_words_ids=[[4], [5, 6]])),
    (dict(eos_token_id=297), dict(forced_bos_token_id=5, forced_eos_token_id=[297, 298])),
    (dict(eos_token_id=297), {"_from_model_config": True, "eos_token_id": 297, "transformers_version": "4.40.0"}),
    (dict(eos_token_id=297), dict(max_length=4096, eos_token_id=[298, 297], something_new={"a": [1, None, "é"]})),
    (dict(bos_token_id=1, eos_token_id=2, pad_token_id=3), dict(bos_token_id=4, eos_token_id=[5], pad_token_id=6)),
]


@pytest.mark.parametrize("number", range(len(SPECIALS)))
def test_special_tokens_and_sampling_come_back(number: int, model: Path, tmp_path: Path) -> None:
    config, generation = SPECIALS[number]
    source = tmp_path / "source"
    shutil.copytree(model, source)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    raw = {k: v for k, v in json.loads((source / "config.json").read_text()).items() if k not in names} | config
    (source / "config.json").write_text(json.dumps(raw))
    (source / "generation_config.json").unlink()
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    export = round_trip(source, tmp_path)
    assert {k: v for k, v in json.loads((export / "config.json").read_text()).items() if k in names} == config
    written = json.loads((export / "generation_config.json").read_text())
    if generation is not None:
        assert written == generation
    read = [transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (source, export)]
    assert [read[0].get(name) for name in names] == [read[1].get(name) for name in names]
    ids = [made.get(name) for made in (generation or config, written) for name in names]
    assert ids[:3] == ids[3:], "and where there was no file, what transformers makes of config.json"


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def config_says(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def linked_from_a_cache(folder: Path) -> None:
    """The folder of a revision in Hugging Face's cache: every file a link to its blob."""
    blobs, home = (
        folder.parent / "models--org--name" / "blobs",
        folder.parent / "models--org--name" / "snapshots" / "a1",
    )
    shutil.move(folder, blobs)
    home.mkdir(parents=True)
    for path in blobs.iterdir():
        (home / path.name).symlink_to(f"../../blobs/{path.name}")
    folder.symlink_to(home)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "as it is saved": lambda folder: None,
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "a template with CRLF": put("chat_template.jinja", TEMPLATE.replace("}{", "}\r\n{")),
    "a template of other letters": put("chat_template.jinja", "{{ 'Ω — 日本 ' }}" + TEMPLATE),
    "an empty template": put("chat_template.jinja", ""),
    "a template that refuses": put("chat_template.jinja", RAISES),
    "a template that is none": put("chat_template.jinja", "{% if %}"),
    "in tokenizer_config.json": config_says(chat_template=TEMPLATE),
    "several in tokenizer_config.json": config_says(
        chat_template=[{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "R" + TEMPLATE}]
    ),
    "several in files": put("additional_chat_templates/tool_use.jinja", "T" + TEMPLATE),
    "in both places": lambda folder: (
        config_says(chat_template="old")(folder), put("chat_template.jinja", TEMPLATE)(folder)
    )[1],
    "a map of special tokens": put("special_tokens_map.json", json.dumps({"bos_token": "<|begin|>", "eos_token": "a"})),
    "special tokens as objects": config_says(bos_token={"content": "<|begin|>", "__type": "AddedToken"}),
    "added tokens": put("added_tokens.json", json.dumps({"<|begin|>": 300})),
    "a sentencepiece model too": put("tokenizer.model", b"\x0a\x00not read\xff"),
    "GPT-2's two files too": lambda folder: (put("vocab.json", "{}")(folder), put("merges.txt", "#version")(folder))[1],
    "a class of its own": config_says(tokenizer_class="Qwen2TokenizerFast", model_max_length=77),
    "a side to pad on": config_says(padding_side="left", truncation_side="left", clean_up_tokenization_spaces=False),
    "names of its own": config_says(extra_special_tokens={"image_token": "<|im_start|>"}),
    "a link inside": lambda folder: (
        put("real.jinja", TEMPLATE + "x")(folder),
        (folder / "chat_template.jinja").unlink(),
        (folder / "chat_template.jinja").symlink_to("real.jinja"),
    )[2],
    "a cache": linked_from_a_cache,
}  # fmt: skip


def answers(folder: Path) -> list[Any]:
    """What a user sees of a tokenizer through transformers."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    seen: list[Any] = [theirs.special_tokens_map, theirs("Hi <|im_start|>é")["input_ids"], theirs.model_input_names]
    seen += [theirs.padding_side, theirs.model_max_length, sorted(theirs(TALK[0]["content"]))]
    for name in (None, "rag", "tool_use"):
        for prompt in (False, True):
            try:
                seen.append(theirs.apply_chat_template(TALK, chat_template=name, add_generation_prompt=prompt))
            except Exception as error:  # the same of both
                seen.append((type(error), str(error)))
    return [dict(one) if hasattr(one, "keys") else one for one in seen]


@pytest.mark.parametrize("case", FOLDERS)
def test_a_tokenizer_folder_is_the_same_behind_a_checkpoint(case: str, model: Path, tmp_path: Path) -> None:
    source, kept, export = tmp_path / "source", tmp_path / "kept", tmp_path / "export"
    shutil.copytree(model, source)
    FOLDERS[case](source)
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))
    kept.mkdir()
    for name, content in tokenizer_files(tokenizer).items():
        assert "/" not in name, "a checkpoint is one folder"
        (kept / name).write_bytes(content)
    loaded = load_tokenizer(kept)
    export.mkdir()
    for name, content in huggingface_files(loaded).items():
        put(name, content)(export)
    shutil.copy(source / "config.json", export)
    assert answers(source) == answers(export)
    carried = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    model_files = {"config.json", "generation_config.json", "model.safetensors", "real.jinja"}
    assert carried - model_files == {p.relative_to(export).as_posix() for p in export.rglob("*") if p.is_file()} - {
        "config.json"
    }


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_tokenizer_comes_back_from_megatrons_checkpoint(form: str, model: Path, tmp_path: Path) -> None:
    """It lies in the run's folder, where Megatron-LM's flag may name it."""
    where = tmp_path / "megatron"
    (write_megatron if form == "torch" else write_torch_dist)(HuggingFaceSource(model), where)
    assert answers(where) == answers(model)
    write_checkpoint(open_megatron(where, None), tmp_path / "ours")
    export = write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "export")
    assert answers(export) == answers(model)


def test_files_beside_a_tokenizer_decide_no_id(model: Path, tmp_path: Path) -> None:
    """What is cached for a tokenizer stays valid when only its template changes."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    first = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))
    put("chat_template.jinja", "another")(source)
    second = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second) and first.beside != second.beside


def fifo(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (put("chat_template.jinja", "x" * (1 << 20) + "y"), "larger than 1 MiB"),
        (fifo, "chat_template.jinja: is not a file"),
        (lambda folder: [put(f"additional_chat_templates/t{n}.jinja", "x")(folder) for n in range(65)], "64 at most"),
        (put("tokenizer_config.json", "["), "tokenizer_config.json beside it is not a JSON object"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_tokenizers_is_refused(change: Any, line: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    change(source)
    with pytest.raises(DataError, match=line):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "../../../../etc/hostname"])
def test_a_link_out_of_a_strangers_folder_is_not_followed(
    target: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a file of the user's would travel into checkpoints and be published with an export."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (tmp_path / "secret").write_text("key")
    (source / "special_tokens_map.json").symlink_to(target)
    (source / "chat_template.jinja").unlink()
    (source / "chat_template.jinja").symlink_to(target)
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(source))
    assert not tokenizer.beside
    if Path(source / target).exists():
        assert "is a link out of its folder" in caplog.text


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["code.Tokenizer", None]}, {"AutoTokenizer": "x--code.T"}, []])
def test_no_export_names_a_program(auto_map: Any, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"auto_map": auto_map, "tokenizer_class": "TheirTokenizer"}
    path.write_text(json.dumps(config))
    generation = json.loads((source / "generation_config.json").read_text()) | {"auto_map": auto_map}
    (source / "generation_config.json").write_text(json.dumps(generation))
    export = round_trip(source, tmp_path)
    assert not any("auto_map" in file.read_text() for file in export.glob("*.json"))
    assert transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=False)("a")


def test_a_run_with_another_tokenizer_keeps_sampling_and_no_token(model: Path, tmp_path: Path) -> None:
    origin = Origin.from_meta(json.loads(json.dumps(HuggingFaceSource(model).origin.to_meta())))
    assert origin == HuggingFaceSource(model).origin
    own = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))
    assert origin.has_tokens_of(own) and origin.has_tokens_of(NullTokenizer(304))
    assert special_tokens(origin, own) == dict(bos_token_id=None, eos_token_id=297, pad_token_id=298)
    assert special_tokens(origin, ByteTokenizer()) == dict(bos_token_id=256, eos_token_id=256)
    assert generation_config(origin, ByteTokenizer()) == dict(bos_token_id=256, eos_token_id=256) | SAMPLING
    # a model that began with random weights has what its tokenizer says
    assert special_tokens(Origin(), own) == dict(bos_token_id=300, eos_token_id=297, pad_token_id=298)


BEGINS: list[tuple[dict[str, Any] | None, dict[str, Any] | None, Any, Any]] = [
    # tokenizer_config.json, special_tokens_map.json -> bos_token_id ("eod": the end of document), pad_token_id (...:
    # not written)
    (None, None, "eod", ...),
    ({}, None, "eod", ...),
    ({"model_max_length": 9}, None, "eod", ...),
    ({"tokenizer_class": "GPT2Tokenizer"}, None, "eod", ...),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, None, None, ...),
    ({"tokenizer_class": "TokenizersBackend"}, None, None, ...),
    ({"tokenizer_class": "TokenizersBackend", "bos_token": "<|begin|>"}, None, 300, ...),
    ({"bos_token": "<|begin|>"}, None, 300, ...),
    ({"bos_token": {"content": "<|begin|>", "__type": "AddedToken"}}, None, 300, ...),
    ({"bos_token": None}, None, None, ...),
    ({"bos_token": "no token"}, None, None, ...),
    ({"bos_token": "\ud800"}, None, None, ...),
    ({"bos_token": 7}, None, None, ...),
    ({"bos_token": ["<|begin|>"]}, None, None, ...),
    ({"bos_token": {"content": 3}}, None, None, ...),
    ({}, {"bos_token": "<|begin|>"}, 300, ...),
    (None, {"bos_token": {"content": "<|begin|>"}}, 300, ...),
    ({"bos_token": None}, {"bos_token": "<|begin|>"}, None, ...),
    ({"pad_token": "<|endoftext|>"}, None, "eod", 298),
    ({"pad_token": None, "eos_token": "<|endoftext|>"}, {"pad_token": "<|im_start|>"}, "eod", ...),
]


@pytest.mark.parametrize("number", range(len(BEGINS)))
def test_a_model_of_random_weights_has_its_tokenizers_tokens(number: int, model: Path, tmp_path: Path) -> None:
    config, names, begin, pad = BEGINS[number]
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps({"eos_token": "<|im_end|>"} | content if config else content))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert special_tokens(Origin(), tokenizer) == {
        "bos_token_id": tokenizer.eod_id if begin == "eod" else begin,
        "eos_token_id": tokenizer.eod_id,
        **({} if pad is ... else {"pad_token_id": pad}),
    }


@pytest.mark.parametrize(
    ("folder", "hub_id"),
    [
        ("hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de3", "meta-llama/Llama-3.2-1B"),
        ("hub/models--gpt2/snapshots/607a30d", "gpt2"),
        ("hub/models--a--b-c--d/snapshots/0", None),
        ("models/llama", None),
        ("models--a--b", None),
        ("datasets--a--b/snapshots/0", None),
        ("models--a--b/refs/main", None),
        ("models--a--b/snapshots/0/more", None),
        ("models--a--b c/snapshots/0", None),
    ],
)
def test_a_hub_id_is_known_from_the_cache_alone(folder: str, hub_id: str | None, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    assert hub_id_of(tmp_path / folder) == hub_id


@pytest.mark.parametrize("content", ["[]", "{", '"a"', "\ud800"])
def test_a_damaged_generation_config_is_named(content: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "generation_config.json").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match="generation_config.json"):
        HuggingFaceSource(source)
