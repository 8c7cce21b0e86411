"""Chat templates that never end, ask for all memory, or reach for Python: one line that names the conversation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.data import ChatTemplate, IndexedDataset, make_tokenizer, preprocess_chat
from megalite.data.chat_process import ChatRenderer, Rendered, TemplateLimit
from megalite.errors import DataError

LIMITS = "megalite.data.chat_process.LIMITS"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
#: 0.4 s and 320 MiB: what an honest template needs of them is a thousandth and a sixth.
SMALL = {"seconds": 0.4, "seconds_a_message": 0, "memory": 320 << 20, "characters": 1 << 20}
#: For templates that meet another limit first: on a busy machine, filling memory takes half a second of processor time.
PATIENT = SMALL | {"seconds": 10}
LOOP = "{{% for i in range(100000) %}}{}{{% endfor %}}"
TIME, MEMORY, TEXT, REFUSED = "seconds of processor time", "MiB of memory", "characters of text", "refuses it"
TEMPLATES = {
    "nested ranges": (LOOP.format(LOOP.format("")), TIME),
    "nested ranges in a macro": ("{% macro f() %}" + LOOP.format(LOOP.format("")) + "{% endmacro %}{{ f() }}", TIME),
    "a power of a power": ("{{ 10 ** (10 ** 9) % 7 }}", TIME),
    "a number that is squared": ("{% set n = namespace(v=3) %}" + LOOP.format("{% set n.v = n.v * n.v %}"), TIME),
    "a list that grows in a loop": (
        "{% set n = namespace(v=[1]) %}" + LOOP.format("{% set n.v = n.v + n.v %}"),
        MEMORY,
    ),
    "a repeated string": ("{{ 'a' * 10 ** 10 }}", MEMORY),
    "a repeated string, its length": ("{{ ('a' * 2 * 10 ** 10) | length }}", MEMORY),
    "a repeated list": ("{{ ([1] * 10 ** 9) | length }}", MEMORY),
    "centred": ("{{ 'a' | center(10 ** 9) }}", MEMORY),
    "a padded format": ("{{ '%1000000000s' | format('a') }}", MEMORY),
    "str.format": ("{{ '{:>1000000000}'.format(1) }}", MEMORY),
    "ljust": ("{{ 'a'.ljust(10 ** 9) }}", MEMORY),
    "a doubled string": ("{% set n = namespace(v='ab') %}" + LOOP.format("{% set n.v = n.v ~ n.v %}"), MEMORY),
    "replace": ("{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 5) }}", MEMORY),
    "join": ("{{ range(100000) | join('a' * 10 ** 5) }}", MEMORY),
    "indent": ("{{ ('\n' * 10 ** 5) | indent(10 ** 5, blank=true) }}", MEMORY),
    "tojson with an indent": ("{{ range(100000) | list | tojson(indent=10 ** 5) }}", MEMORY),
    "text without end": (LOOP.format("{{ 'a' * 1000 }}"), TEXT),
    "the conversation times a thousand": (LOOP.format("{{ messages }}"), TEXT),
    "a range above the sandbox's": ("{% for i in range(10 ** 9) %}{% endfor %}", REFUSED),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", REFUSED),
    "Python's classes": ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", REFUSED),
    "globals of a function": ("{{ raise_exception.__globals__['json'] }}{{ cycler.__init__.__globals__.os }}", REFUSED),
    "a namespace with a dunder": ("{% set n = namespace(__class__=1) %}", REFUSED),
    "half a character": ("{{ '\\ud800' }}", "lone surrogate"),
    "an include": ("{% include '/etc/passwd' %}", REFUSED),
    "its own refusal, without a word": ("{{ raise_exception('') }}", REFUSED),
}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, SMALL)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_ends_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, says = TEMPLATES[name]
    monkeypatch.setattr(LIMITS, SMALL if says == TIME else PATIENT)
    begin = time.process_time()
    with pytest.raises(DataError, match=says) as caught:
        for found in ChatRenderer(template, {}).render([TALK]):
            assert isinstance(found, DataError), found
            raise found
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TemplateLimit) == (says in (TIME, MEMORY, TEXT))
    assert time.process_time() - begin < 1  # of this process, whose own memory and time are spared


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% generation %}",
        "{{ 1 ** }}",
        "{{ x | no_filter }}",
    ],
)
def test_what_is_no_template_is_said_at_the_start(template: str) -> None:
    with pytest.raises(DataError, match="the chat template (is none|needs)"):
        ChatRenderer(template, {})


def write(folder: Path, template: str, lines: list[Any]) -> tuple[Any, ChatTemplate, Path]:
    """A tokenizer without transformers: every byte is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tokenizer, ChatTemplate(tokenizer, str(folder)), file


#: Endless where somebody says "again"; refuses "no".
WAITS = (
    "{% for m in messages %}{% if m.content == 'again' %}" + LOOP.format(LOOP.format("")) + "{% endif %}"
    "{% if m.content == 'no' %}{{ raise_exception('it says no') }}{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def say(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}, TALK[1]]}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_conversation_is_named_by_file_and_line(workers: int, tmp_path: Path) -> None:
    """In every process that tokenises, after blank lines and lines that were left out."""
    tokenizer, template, file = write(tmp_path, WAITS, [say("a"), say("again"), say("b")])
    file.write_text("\n\n{broken\n" + file.read_text())
    with pytest.raises(DataError, match=r"talks\.jsonl:5: the chat template needs more than 0\.4 seconds"):
        preprocess_chat([str(file)], str(tmp_path / "o"), tokenizer, template, workers=workers, skip_bad_lines=True)


def test_lines_that_a_template_refuses_are_left_out(tmp_path: Path) -> None:
    tokenizer, template, file = write(tmp_path, WAITS, [say("a"), say("no"), say("b")])
    with pytest.raises(DataError, match=r"talks\.jsonl:2: the chat template refuses it \(it says no\)"):
        preprocess_chat([str(file)], str(tmp_path / "o"), tokenizer, template)
    summary = preprocess_chat([str(file)], str(tmp_path / "p"), tokenizer, template, skip_bad_lines=True)
    assert len(IndexedDataset(summary.prefixes[0])) == 2 and summary.skipped == 1


def test_more_conversations_than_travel_together_and_large_ones() -> None:
    """Both pipes fill up more than once; texts and order are kept."""
    renderer = ChatRenderer(WAITS, {})
    talks = [say(f"{i} " + "é" * (i % 7 * 20_000))["messages"] for i in range(300)]
    for talk, found in zip(talks, renderer.render(talks), strict=True):
        assert isinstance(found, Rendered)
        assert found.text == f"user:{talk[0]['content']}\nassistant:yo\n"
        assert [found.text[a:b] for a, b in found.answers] == ["yo"]
    renderer.close()
