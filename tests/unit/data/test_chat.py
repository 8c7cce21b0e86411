"""Conversations by the tokenizer's template: ids and answers are transformers', and the loss counts answers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import DataConfig
from megalite.data import ChatTemplate, IndexedDataset, build_datasets, make_tokenizer, preprocess_chat, survey
from megalite.data.chat import read_template
from megalite.data.chat_process import ChatRenderer, Rendered
from megalite.data.corpus import file_corpus
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import ANSWER, END
from megalite.data.loader import BatchLoader, DocumentMasks
from megalite.errors import DataError
from tests.source_tree import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
) + PROMPT
TELLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
) + PROMPT
TALKS = [
    [
        ("system", "Be short."),
        ("user", "Hi, who?"),
        ("assistant", "  A small model.\n"),
        ("user", "é?"),
        ("assistant", "日本"),
    ],
    [("user", "1 + 1"), ("assistant", "2")],
    [("user", "Say nothing"), ("assistant", "")],
    [("user", "and "), ("assistant", "so on, and so on, and so on " * 3)],
]
#: A template that tells where answers are is rendered once, whatever it does with them.
TURNED_OFF = "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
MESSAGES = [[{"role": role, "content": text} for role, text in talk] for talk in TALKS]


def tokenizer_with(template: str | None, folder: Path) -> Any:
    """Byte-level BPE of few merges, with ChatML's special tokens; `<|im_end|>` ends messages, and is the eos token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["assistant user system a small model and so on"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


@pytest.mark.parametrize("template", [CHATML, TELLS], ids=["plain", "with generation blocks"])
def test_ids_and_answers_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    """Also of a template that does not say what an answer is: it marks what the one that does would."""
    theirs = tokenizer_with(TELLS, tmp_path / "tells")
    tokenizer_with(template, tmp_path / "ours")
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "ours"))
    chat = ChatTemplate(tokenizer, str(tmp_path / "ours"))
    for messages in MESSAGES:
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        [(ids, answers)] = chat.encode([messages])
        assert ids == list(expected["input_ids"])
        assert [int(answer) for answer in answers] == list(expected["assistant_masks"])
        assert any(answers) and not all(answers)


#: What templates of the field are made of.
HONEST = [
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}\n{% for m in messages %}\n    {%- set ns.n = ns.n + 1 %}\n{{ ns.n }}:"
    "{{ m | tojson }}\n{% endfor %}\n{{ unk_token is defined }} {{ pad_token }}",
    "{% macro say(m) %}<{{ m.role | upper }}>{{ m.content }}{% endmacro %}{% for m in messages if m.content %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{{ say(m) }}{% endfor %}{{ tools is none }}"
    "{{ documents is defined }}",
    "{% for m in messages %}{{ m.name is defined }}{{ m.reasoning_content }}{{ m.get('thinking', '-') }}"
    "{{ loop.cycle('a', 'b') }}{{ m.content.split('\n')[-1].strip() }}"
    "{{ '%03d' | format(loop.index) }}\n{% endfor %}",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    "{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}"
    "{{ range(3) | join(',') }}",
]


@pytest.mark.parametrize("template", HONEST)
def test_texts_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    """Special tokens, fields that are null, white space around blocks, filters, and what a template refuses."""
    tokenizer_with(template, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": "<|im_start|>", "__type": "AddedToken"}, "unk_token": None, "pad_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    text, variables = read_template(tmp_path)
    assert text == theirs.chat_template
    more = {"role": "user", "content": " x\n\n", "name": None, "thinking": "hm <&>'"}
    talks = [*MESSAGES, [more, *MESSAGES[0][2:]], [more, more]]
    for messages, ours in zip(talks, ChatRenderer(text + TURNED_OFF, variables).render(talks), strict=True):
        try:
            expected = theirs.apply_chat_template(messages, chat_template=text + TURNED_OFF, tokenize=False)
        except Exception as error:
            assert isinstance(ours, DataError) and str(error) in str(ours)
        else:
            assert isinstance(ours, Rendered) and ours.text == expected


def write(tmp_path: Path, lines: list[Any], template: str | None = CHATML, **more: Any) -> tuple[Any, Path]:
    tokenizer_with(template, tmp_path / "tokenizer")
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer"))
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = ChatTemplate(tokenizer, str(tmp_path / "tokenizer"))
    summary = preprocess_chat([str(file)], str(tmp_path / "chat"), tokenizer, chat, **more)
    return tokenizer, Path(summary.prefixes[0])


def test_the_loss_counts_answers_and_documents_end_with_conversations(tmp_path: Path) -> None:
    """Every label with a loss is a token of an answer, whatever the end-of-document token ends besides."""
    tokenizer, prefix = write(tmp_path, [{"messages": messages} for messages in MESSAGES], workers=2)
    store = IndexedDataset(prefix)
    assert store.marks is not None and len(store) == len(MESSAGES) and store.marks.dtype == np.uint8
    stream, marks = store.stream(0, store.num_tokens), store.marks.stream(0, store.num_tokens)
    assert (np.flatnonzero(marks & END) + 1).tolist() == np.cumsum(store.lengths).tolist()
    source = GPTDataset(store, 0, len(store), seq_length=24, requests=(None,), seed=1).sequential()
    masks = DocumentMasks(eod_id=tokenizer.eod_id, reset_position_ids=True, reset_attention_mask=True)
    counted, at = [], 0
    with BatchLoader(source, consumed_samples=0, micro_batch_size=1, dp_rank=0, dp_size=1, masks=masks) as loader:
        for [batch] in loader.full_pass(1):
            count = min(24, store.num_tokens - 1 - at)
            expected = (marks[at + 1 : at + 1 + count] & ANSWER).astype(np.float32)
            assert batch.loss_mask[0, :count].tolist() == expected.tolist() and not batch.loss_mask[0, count:].any()
            counted += batch.labels[0][batch.loss_mask[0] > 0].tolist()
            ends = np.cumsum(store.lengths)
            assert batch.document_starts is not None
            for place in range(count):
                first = int(max([end for end in ends if end <= at + place], default=0))
                assert int(batch.document_starts[0, place]) == max(first - at, 0)
                assert int(batch.positions[0, place]) == at + place - max(first, at)
            at += 24
    assert counted == stream[(marks & ANSWER) > 0].tolist()
    words = [m["content"] + "<|im_end|>" for messages in MESSAGES for m in messages if m["role"] == "assistant"]
    assert tokenizer.backend.decode(counted, skip_special_tokens=False) == "".join(words)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            {"text": "a"},
            "no list of messages in field 'messages'; it has text; a line is {.*, or another field is named",
        ),
        ({}, "no list of messages in field 'messages'; it has no field at all"),
        ([1], "no list of messages in field 'messages'; it has no field at all"),
        ({"messages": []}, "talks.jsonl:1: the list in field 'messages' is empty; drop the line, or --skip-bad-lines"),
        ({"messages": {}}, "no list of messages in field 'messages'; it has messages; a line is "),
        ({"talk": MESSAGES[1]}, "no list .*; name the field by --json-keys: talk holds a list of objects"),
        ({"id": 1, "items": [{"from": "gpt", "value": "a"}]}, "no list .*; name the field by --json-keys: items holds"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "message 1 is from 'bing'; of ShareGPT's form human, "),
        ({"conversations": [{"from": "human", "value": 1}]}, "message 1 is not an object with a role and a content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "message 1 has a part of type image_url; parts of its content must be of type text",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "message 1 is not an object with a role and a content"),
        ({"instruction": "a", "input": "", "output": "b"}, "no list .*; a question and its answer are two messages: {"),
        (
            {"prompt": MESSAGES[1][:1], "completion": MESSAGES[1][1:]},
            "no list .*; join prompt and completion to one list of messages: {",
        ),
        ({"prompt": "a", "completion": "b"}, "no list .*; a question and its answer are two messages"),
        ({"prompt": "a", "response": "b"}, "no list .*; a question and its answer are two messages"),
        ({"question": "a", "answer": "b"}, "no list .*; a question and its answer are two messages"),
        ({"messages": [{"role": "user"}]}, "message 1 is not an object with a role and a content that are texts"),
        ({"messages": MESSAGES[1], "tools": [{}]}, "has tools, which are not supported"),
        ({"messages": MESSAGES[1][1:]}, "talks.jsonl:1: answer 1 is the first, .*; put a message of the user before"),
    ],
)
def test_a_broken_line_is_named_or_left_out(line: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        write(tmp_path, [line, {"messages": MESSAGES[1]}])
    _, prefix = write(tmp_path, [line, {"messages": MESSAGES[1]}], skip_bad_lines=True)
    assert len(IndexedDataset(prefix)) == 1


def test_other_forms_of_a_conversation_give_the_same_tokens(tmp_path: Path) -> None:
    """ShareGPT's, under its own name and under ours, and contents that are lists of texts."""
    speakers = {"user": "human", "assistant": "gpt"}
    share = [[{"from": speakers.get(m["role"], m["role"]), "value": m["content"]} for m in talk] for talk in MESSAGES]
    parts = [
        [{"role": m["role"], "content": [{"type": "text", "text": t} for t in (m["content"][:2], m["content"][2:])]}
         for m in talk]
        for talk in MESSAGES
    ]  # fmt: skip
    forms = [("messages", MESSAGES), ("conversations", share), ("messages", share), ("messages", parts)]
    stores = []
    for number, (key, talks) in enumerate(forms):
        (tmp_path / str(number)).mkdir()
        _, prefix = write(tmp_path / str(number), [{key: talk} for talk in talks])
        stores.append(IndexedDataset(prefix))
    for store in stores[1:]:
        assert store.lengths.tolist() == stores[0].lengths.tolist()
        assert store.stream(0, store.num_tokens).tolist() == stores[0].stream(0, store.num_tokens).tolist()
        assert store.marks is not None and stores[0].marks is not None
        assert store.marks.stream(0, store.num_tokens).tolist() == stores[0].marks.stream(0, store.num_tokens).tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_that_are_left_out_and_unusual_roles_are_told(workers: int, tmp_path: Path) -> None:
    tokenizer_with(CHATML, tmp_path / "tokenizer")
    lines: list[Any] = [{"messages": MESSAGES[1]}, {"text": "a"}, "", {"messages": MESSAGES[1][1:]}]
    lines += [{"messages": [*MESSAGES[1], {"role": "bot", "content": "hm"}]}, *[{"messages": []}] * 4]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(line) * bool(line) + "\n" for line in lines))
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--data-format", "chat", "--skip-bad-lines"]
    files = ["--input", str(file), "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer")]
    result = subprocess.run([*tool, *files, *kind], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    at = said.index("left out 6 broken lines:")
    assert said[at + 1].startswith(f"  {file}:2: no list of messages in field 'messages'")
    assert all(line.startswith(f"  {file}:") for line in said[at + 1 : at + 4]) and said[at + 4] == "  and 3 more"
    assert (
        "note: other roles than system, user and assistant, of which the template decides what is learnt: 'bot'" in said
    )


CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"


@pytest.mark.parametrize(("template", "lost"), [(CHATML, 2), (CALLS, 1)], ids=["without calls", "with calls"])
def test_calls_that_the_template_leaves_out_are_counted(template: str, lost: int, tmp_path: Path) -> None:
    tokenizer_with(template, tmp_path / "tokenizer")
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer"))
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look_up"}}]}
    asks = MESSAGES[1][0]
    talks = [MESSAGES[1], [asks, call, {"role": "tool", "content": "7"}], [asks, {**call, "tool_calls": [3]}]]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    made = ChatTemplate(tokenizer, str(tmp_path / "tokenizer"))
    assert preprocess_chat([str(file)], str(tmp_path / "out"), tokenizer, made).lost_calls == lost


WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
) + PROMPT


def test_calls_without_content_are_what_the_template_makes_of_them(tmp_path: Path) -> None:
    """As OpenAI and TRL write them; a template that needs a text says so in a line, and other messages need one."""
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]}
    talks = [
        [MESSAGES[1][0], {**call, **content}, {"role": "tool", "content": "7"}, MESSAGES[1][1]]
        for content in ({"content": None}, {}, {"content": ""})
    ]
    _, prefix = write(tmp_path, [{"messages": talk} for talk in talks], WITH_CALLS)
    store = IndexedDataset(prefix)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for number, talk in enumerate(talks):
        assert store.get(number).tolist() == theirs.apply_chat_template(talk, tokenize=True, return_dict=False)
    with pytest.raises(DataError, match="talks.jsonl:1: the chat template refuses it .*content"):
        write(tmp_path, [{"messages": talks[0]}], CHATML)
    for broken in ({**call, "role": "user"}, {**call, "tool_calls": []}, {**call, "content": 3}):
        with pytest.raises(DataError, match="message 2 is not an object with a role and a content that are texts"):
            write(tmp_path, [{"messages": [MESSAGES[1][0], broken]}], WITH_CALLS)


@pytest.mark.parametrize("name", ["talks.parquet", "saved", "hf:some/talks"])
def test_other_forms_than_json_lines_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    (tmp_path / "talks.parquet").write_bytes(b"PAR1\xff")
    tokenizer_with(CHATML, tmp_path / "tokenizer")
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer"))
    with pytest.raises(DataError, match=f"^--input={name}: --data-format=chat reads JSON lines .*ds.to_json"):
        preprocess_chat([name], "out", tokenizer, ChatTemplate(tokenizer, str(tmp_path / "tokenizer")))
    if name == "talks.parquet":
        with pytest.raises(DataError, match="^--data-path=talks.parquet: is Parquet, not text"):
            file_corpus(name)


QUESTION = [{"role": "user", "content": "and?"}]


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations_without_an_answer_are_counted(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the tool, and when a training reads what it wrote."""
    talks = [QUESTION, MESSAGES[0], [{"role": "bot", "content": "hm"}, *QUESTION], MESSAGES[1], QUESTION]
    tokenizer, prefix = write(tmp_path, [{"messages": talk} for talk in talks], workers=workers)
    assert survey.unanswered(IndexedDataset(prefix)) == 3
    (tmp_path / "alone").mkdir()
    with pytest.raises(DataError, match="none of its 2 conversations has an answer of the assistant"):
        write(tmp_path / "alone", [{"messages": talk} for talk in (talks[0], talks[2])])
    config = DataConfig(data_path=(str(prefix),), split="1,0,0")
    asked: Any = {"seq_length": 8, "train_samples": 2, "seed": 1, "tokenizer": tokenizer, "cache_dir": None}
    build_datasets(config, valid_samples=0, test_samples=0, **asked)
    assert (
        f"`data_path`={prefix}: conversations without an answer of the assistant, of which nothing is learnt: 3 of 5"
        in caplog.text
    )
    with pytest.raises(DataError, match="none of its 1 conversations has an answer"):  # the last one is held back
        build_datasets(replace(config, split="80,20,0"), valid_samples=2, test_samples=0, **asked)
    empty = (
        r"the valid split is empty \(0 documents, 0 tokens\); give more text or .* in --split, or .* by --eval-iters 0"
    )
    with pytest.raises(DataError, match=empty):  # 3 % of five conversations
        build_datasets(replace(config, split="969,30,1"), valid_samples=2, test_samples=0, **asked)


def test_marks_that_are_missing_or_of_other_tokens_are_refused(tmp_path: Path) -> None:
    _, prefix = write(tmp_path, [{"messages": messages} for messages in MESSAGES])
    other = tmp_path / "other"
    other.mkdir()
    _, fewer = write(other, [{"messages": MESSAGES[0]}])
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}_marks{suffix}").write_bytes(Path(f"{fewer}_marks{suffix}").read_bytes())
    with pytest.raises(DataError, match="_marks marks other tokens"):
        IndexedDataset(prefix)
    Path(f"{prefix}_marks.idx").unlink()
    with pytest.raises(DataError, match="_marks.idx not found"):
        IndexedDataset(prefix)


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        write(tmp_path, [{"messages": MESSAGES[0]}], template=None)


def test_an_answer_that_is_the_first_token_alone_is_no_more_than_that(tmp_path: Path) -> None:
    """Its last token has the number 0, which is a number."""
    template = "{% generation %}x{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer_with(template, tmp_path)
    tokenizer: Any = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    talk = [{"role": "user", "content": " and much more"}]
    [(ids, answers)] = ChatTemplate(tokenizer, str(tmp_path)).encode([talk])
    begins = tokenizer.backend.encode("x and much more", add_special_tokens=False).offsets
    assert ids and answers == [begin == 0 for begin, _ in begins] and begins[0] == (0, 1)
