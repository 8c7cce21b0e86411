"""`generate_text.py --chat`: answers are those of transformers with the same template, whatever the template tries."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.config import Sampling
from megalite.convert import Origin
from megalite.errors import ConfigError, DataError
from megalite.generation import read_talks
from megalite.inference import LoadedModel, model_sampling
from tests.unit.convert.chat_model import SAMPLING, TEMPLATE, save_model, save_tokenizer
from tests.unit.inference.tiny_checkpoint import write_checkpoint
from tools.command_line import run_tool
from tools.generate_text import main

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
NEW = 12
ASKED = ["Who are you?", "and é?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder)
    save_tokenizer(folder)
    return folder


def theirs(folder: Path, messages: list[dict[str, str]]) -> str:
    """The answer of transformers, without stop tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = peer.generate(**prompt, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.0)
    new = [int(token) for token in ids[0, prompt["input_ids"].shape[1] :] if token not in (297, 298)]
    return str(tokenizer.decode(new))


def chat(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_tool(main, ["--chat", "--max-new-tokens", str(NEW), "--device", "cpu", *flags])
    return status, *capsys.readouterr()


def test_a_prompt_is_answered_as_by_transformers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = {"role": "user", "content": ASKED[0]}
    status, out, error = chat(capsys, "--load", str(model), "--prompt", ASKED[0], "--greedy")
    assert (status, out) == (0, theirs(model, [user]) + "\n"), error
    assert error.splitlines()[-1] == "sampling: greedy; not applied: repetition_penalty 1.05"
    _, out, error = chat(capsys, "--load", str(model), "--prompt", ASKED[0], "--greedy", "--system", "Be short.")
    assert out == theirs(model, [{"role": "system", "content": "Be short."}, user]) + "\n"
    first, second = (chat(capsys, "--load", str(model), "--prompt", "Hi", "--num-samples", "2") for _ in range(2))
    assert first == second and "sampling: temperature 0.6, top-k 20, top-p 0.9; not applied" in first[2]
    assert len(set(first[1].rstrip("\n").split("\n---\n"))) == 2


def test_lines_of_standard_input_are_a_conversation(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk: list[dict[str, str]] = []
    for line in ASKED:
        talk.append({"role": "user", "content": line})
        talk.append({"role": "assistant", "content": theirs(model, talk)})
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([ASKED[0], "", ASKED[1]])))
    status, out, error = chat(capsys, "--load", str(model), "--greedy")
    assert (status, out) == (0, "".join(talk[place]["content"] + "\n" for place in (1, 3))), error


@pytest.mark.parametrize("where", ["--prompt", "--system", "stdin"])
def test_half_a_character_is_the_users(
    where: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff\n"))
    flags = {"--prompt": ["--prompt", "a\udcff"], "--system": ["--prompt", "a", "--system", "\udcff"], "stdin": []}
    status, out, error = chat(capsys, "--load", str(model), *flags[where])
    assert (status, out) == (2, "")
    assert f"error: {'--chat' if where == 'stdin' else where}=" in error and "half a character" in error


def test_a_file_of_conversations(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [[{"role": "user", "content": text}] for text in ASKED]
    talks.append([*talks[0], {"role": "assistant", "content": "Me."}, *talks[1]])
    file = tmp_path / "talks.jsonl"
    lines: list[Any] = [{"prompt": ASKED[0]}, {"messages": talks[1]}, {"messages": talks[2]}]
    file.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    status, out, error = chat(capsys, "--load", str(model), "--greedy", "--prompts", str(file))
    assert status == 0, error
    found = [json.loads(line) for line in out.splitlines()]
    assert found == [{"messages": talk, "sample": 0, "text": theirs(model, talk)} for talk in talks]


def test_no_conversation_has_two_system_messages(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talks.jsonl"
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be short."}
    file.write_text(json.dumps({"prompt": "Hi"}) + "\n\n" + json.dumps({"messages": [system, user]}) + "\n")
    flags = ("--load", str(model), "--greedy", "--prompts", str(file))
    status, out, error = chat(capsys, *flags, "--system", "Be long.")
    assert (status, out) == (2, "")
    line = f"error: {file}:3: has a system message of its own, and --system gives another; drop one of the two"
    assert error.splitlines()[-1] == line
    assert [talk[0]["role"] for talk in read_talks(str(file), "--prompts")] == ["user", "system"]
    (tmp_path / "talks.txt").write_text("Hi\n")
    for name in ("talks.txt", "one.jsonl"):
        (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "Hi"}))
        assert read_talks(str(tmp_path / name), "--prompts", [system]) == [[system, user]]


TEMPLATES: dict[str, tuple[str, str]] = {
    "none": ("", "writes nothing"),
    "no template of Jinja's": ("{% if %}", "the chat template is none"),
    "an error of its own": ("{{ raise_exception('only in French') }}", "refuses it (only in French)"),
    "a way to Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses it"),
    "a file": ("{% include '/etc/passwd' %}", "refuses it"),
    "an import": ("{% import 'os' as os %}{{ os }}", "refuses it"),
    "attributes by a filter": ("{{ messages | attr('__class__') }}{{ messages.__class__ }}", "writes nothing"),
    "globals of a function": ("{{ raise_exception.__globals__ }}", "writes nothing"),
    "a message that is changed": ("{{ messages.append(1) }}", "refuses it"),
    "an unknown filter": ("{{ messages | shell }}", "the chat template is none"),
    "a name that is not there": ("{{ tokenizer.secret.key }}", "refuses it"),
    "more text than the limit": ("{{ 'x' * 30000000 }}", "which is the limit"),
    "more memory than the limit": ("{{ ('x' * 900000000) ~ ('y' * 900000000) }}", "which is the limit"),
    "half a character": ("{{ '\\ud800' }}", "half a character"),
    "a division": ("{{ 1 / 0 }}", "refuses it"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it"),
    "a macro that is undone": ("{% macro f(", "the chat template is none"),
    "roles that alternate": ("{% if messages[0].role == 'user' %}{{ raise_exception('no') }}{% endif %}", "(no)"),
    "system alone": ("{{ messages[1].content + 1 }}", "refuses it"),
    "blank": ("{# nothing #}", "writes nothing"),
}


# What takes seconds runs with --full: the limits themselves have tests of their own.
@pytest.mark.in_turn
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if "memory" in case else []) for case in TEMPLATES]
)
def test_what_a_template_tries_ends_in_one_line(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, line = TEMPLATES[case]
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    status, out, error = chat(capsys, "--load", str(tmp_path / "model"), "--prompt", "Hi")
    assert (status, out) == (2, "")
    assert error.splitlines()[-1].startswith(f"error: --load={tmp_path / 'model'}: ") and line in error
    assert "Traceback" not in error


def test_a_model_without_a_template_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    status, _, error = chat(capsys, "--load", str(tmp_path / "model"), "--prompt", "Hi")
    assert status == 2 and f"error: --load={tmp_path / 'model'}: has no chat template" in error
    write_checkpoint(tmp_path / "run")
    status, _, error = chat(capsys, "--load", str(tmp_path / "run"), "--prompt", "Hi")
    assert status == 2 and "has a ByteTokenizer, which has no chat template" in error
    config = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": ["code.T", None]}})
    )
    status, _, error = chat(capsys, "--load", str(tmp_path / "model"), "--prompt", "Hi")
    assert status == 2 and "names a program to run" in error


# generation_config.json (None: there is none), the flags -> what is drawn by.
DEFAULT = dict(temperature=1.0, top_k=50, top_p=1.0)
CHOICES: list[tuple[Any, dict[str, Any], dict[str, Any] | str]] = [
    (None, {}, {}),
    (None, dict(temperature=0.5), dict(temperature=0.5)),
    ({}, {}, dict(greedy=True)),
    (dict(temperature=0.7), {}, dict(greedy=True)),
    (dict(do_sample=False, temperature=0.7, top_k=5), {}, dict(greedy=True)),
    (dict(do_sample=True), {}, DEFAULT),
    (dict(do_sample=True, temperature=0.6, top_p=0.9), {}, dict(temperature=0.6, top_k=50, top_p=0.9)),
    (dict(do_sample=True, top_k=None), {}, dict(top_k=0)),
    (dict(do_sample=True, top_k=0, top_p=None, temperature=None), {}, dict(top_k=0)),
    (dict(do_sample=True, top_k=20), dict(top_k=3), dict(top_k=3)),
    (SAMPLING, dict(temperature=1.5), dict(temperature=1.5, top_k=20, top_p=0.9)),
    (SAMPLING, dict(greedy=True), dict(greedy=True)),
    (dict(do_sample=False), dict(temperature=0.5), dict(temperature=0.5)),
    (dict(do_sample=True, temperature=0), {}, dict(temperature=0.0, top_k=50)),
    (dict(do_sample="yes"), {}, dict(greedy=True)),
    (dict(do_sample=True, temperature="hot"), {}, "`temperature`=hot in the model's generation_config.json"),
    (dict(do_sample=True, top_k=2.5), {}, "`top_k`=2.5 in the model's generation_config.json"),
    (dict(do_sample=True, top_p=[0.9]), {}, "`top_p`=[0.9] in the model's"),
    (dict(do_sample=True, temperature=-1), {}, "`temperature`=-1: must be >= 0"),
    (dict(do_sample=True, top_p=float("nan")), {}, "`top_p`=nan: must be above 0"),
    (dict(do_sample=True, temperature=True), {}, "is no number"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_sampling_is_the_models_where_flags_say_nothing(number: int) -> None:
    generation, given, expected = CHOICES[number]
    loaded = cast(LoadedModel, SimpleNamespace(origin=Origin("llama", {}, generation)))
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as caught:
            model_sampling(loaded, given, 7)
        assert expected in caught.value.text
        return
    found, ignored = model_sampling(loaded, given, 7)
    assert found == Sampling(**expected, seed=7)
    assert ignored == (["repetition_penalty 1.05"] if generation is SAMPLING else [])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": []}', "talks.jsonl:1: the list in field 'messages' is empty; a line is such as"),
        ('{"messages": 3}', "no list of messages"),
        ('{"prompt": 3}', "no list of messages"),
        ("[]", "no list of messages"),
        ("{", "not valid JSON"),
        ('{"messages": [{"role": "user"}]}', "message 1 is not an object with a role"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "nothing waits"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "has tools"),
        ("", "holds no conversation"),
    ],
)
def test_a_broken_conversation_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="talks.jsonl") as caught:
        read_talks(str(tmp_path / "talks.jsonl"), "--prompts")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--load", "x", "--system", "S"], "--system=S: belongs to --chat; add that"),
        (["--load", "x", "--chat", "--num-samples", "2"], "--num-samples=2: what is typed has one answer"),
        (["--load", "x", "--chat", "--prompt", "a", "--prompts", __file__], "--prompt=a: not with --prompts"),
        (["--load", "x", "--chat", "--greedy", "--top-k", "3", "--prompt", "a"], "--greedy: leaves no choice"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(main, flags) == 2
    assert line in capsys.readouterr().err
