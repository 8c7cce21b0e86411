"""Characters that a stream cannot say are escaped, halves of characters refused: a text never ends a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.data import make_tokenizer, read_jsonl
from megalite.data.chat import parse_messages
from megalite.data.corpus import parse_fields
from megalite.errors import ConfigError, DataError
from megalite.generation import prompt_ids, read_prompts
from megalite.observe import Hook
from megalite.observe.observers import SamplesHook

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("café", "日本", "\U0001f600", "a\ud800b", "\udcff", "\x85\u2028", "e\u0301")
#: Every way to a standard stream that the product, Python or a library takes.
ROUTES = f"""
import argparse, logging, sys, traceback, warnings
from megalite.streams import keep_streams
from tools.command_line import ToolParser, run_tool
keep_streams()
logging.basicConfig(stream=sys.stdout, force=True)
for text in {TEXTS!a}:
    print(text, flush=True)
    sys.stdout.write(text); sys.stdout.writelines([text])
    print(text, file=sys.stderr)
    logging.getLogger("a").warning(text)
    warnings.warn(text)
    try:
        raise ValueError(text)
    except ValueError:
        traceback.print_exc(); traceback.print_exc(file=sys.stdout)
    assert run_tool(lambda argv: ToolParser().parse_args(["--" + text]) and 0, []) == 2
    try:
        argparse.ArgumentParser(text, description=text).parse_args(["--help"])
    except SystemExit as error:
        assert error.code == 0
print("to the end")
"""


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-8:strict"])
def test_every_route_to_a_stream_says_what_it_can(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ROUTES], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    said = done.stdout.decode(encoding.partition(":")[0])
    assert said.endswith("to the end\n") and "a\\ud800b" in said and "Logging error" not in said
    assert ("café" in said) == (encoding[:5] in ("utf-8", "latin", "cp125")) or "caf\\xe9" in said


@pytest.mark.landing
@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_training_whose_output_is_ascii_trains_and_saves(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("café au lait\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text("un café, deux cafés. " * 200, encoding="utf-8")
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
        "--lr 1e-3 --lr-warmup-iters 0 --device cpu --eval-iters 0 --no-full-validation --log-interval 1 "
        f"--data-path {tmp_path}/text.txt --sample-interval 1 --sample-prompts {tmp_path}/prompts.txt "
        f"--sample-tokens 4 --data-cache-path {tmp_path}/cache --save {tmp_path}/café"
    )
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags.split()],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, timeout=120,
    )  # fmt: skip
    said = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert 'sample at iteration 2 | "caf\\xe9 au lait"' in said
    assert (tmp_path / "café" / "iter_0000002").is_dir()
    samples = [json.loads(line) for line in (tmp_path / "café" / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [sample["prompt"] for sample in samples] == ["café au lait"] * 2


#: Spellings of half a character in JSON, and its place in the text.
HALVES = {
    '"\\ud800"': 0,
    '"\\udfff"': 0,
    '"a\\uD83D"': 1,
    '"a\\uDE00\\uD83D"': 1,
    '"\\ud83d\\ud83d\\ude00"': 0,
    '"caf\\u00e9 \\udc80"': 5,
    '"' + "x" * 1000 + '\\udbff"': 1000,
    '"\U0001f600\\ud800"': 1,
}


@pytest.mark.parametrize("spelling", HALVES)
def test_half_a_character_is_refused_with_file_and_line(spelling: str, tmp_path: Path) -> None:
    at, file = HALVES[spelling], tmp_path / "a.jsonl"
    says = f"lone surrogate, at character {at}"
    for key in ("text", "prompt"):
        file.write_text(f'{{"{key}": "fine, \\ud83d\\ude00"}}\n\n{{"{key}": {spelling}}}\n', encoding="utf-8")
        with pytest.raises(DataError, match=f"a.jsonl:3: field '{key}' has half a character .*{says}") as caught:
            list(read_jsonl(str(file), "--data-path", key)) if key == "text" else read_prompts(str(file), "--prompts")
        assert str(caught.value).isascii()
    with pytest.raises(DataError, match=f"a:1: field 'text' has half a character .*{says}"):
        parse_fields(f'{{"text": {spelling}}}'.encode(), ("text",), "a:1")
    for role, content, name in (('"user"', spelling, "content"), (spelling, '"x"', "role")):
        line = f'{{"messages": [{{"role": "a", "content": "b"}}, {{"role": {role}, "content": {content}}}]}}'
        with pytest.raises(DataError, match=f"a:1: {name} of message 2 has half a character .*{says}"):
            parse_messages(line, ("messages",), "a:1")
    with pytest.raises(ConfigError, match="--prompt=.*: has half a character"):
        prompt_ids(make_tokenizer("ByteTokenizer"), [json.loads(spelling)], "--prompt")


def test_raw_bytes_of_half_a_character_are_refused(tmp_path: Path) -> None:
    """JSON's decoder lets them through."""
    with pytest.raises(DataError, match="a:1: field 'text' has half a character"):
        parse_fields(b'{"text": "\xed\xa0\x80"}', ("text",), "a:1")
    (tmp_path / "a.txt").write_bytes(b"fine\n\xed\xa0\x80\n")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_prompts(str(tmp_path / "a.txt"), "--prompts")


def test_samples_with_half_a_character_are_kept(tmp_path: Path) -> None:
    """A vocabulary that a checkpoint brings may spell one."""
    hook: Any = SamplesHook(tmp_path / "samples.jsonl")
    assert isinstance(hook, Hook)
    hook.on_samples(None, [{"kind": "sample", "iteration": 1, "prompt": "é", "text": "a\ud800"}])
    assert json.loads((tmp_path / "samples.jsonl").read_text("utf-8"))["text"] == "a\ud800"
