"""Somebody's file behind `--model-module`: what cannot be trained is one line before the start, with `--dry-run` and
without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.comm import Axis, ContextAxes
from megalite.config import parse
from megalite.errors import ConfigError
from megalite.schedule import build_program
from megalite.train.foreign import ForeignModel

IMPORTS = "import sys\nimport torch\nfrom torch import nn\n"
MODEL = """
class Block(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.up = nn.Linear(h, h)
    def forward(self, x):
        return x + torch.relu(self.up(x))
class Model(nn.Module):
    def __init__(self, v, rows=None, positions=8):
        super().__init__()
        self.words, self.places = nn.Embedding(rows or v, 16), nn.Embedding(positions, 16)
        self.blocks, self.out = nn.Sequential(*[Block(16) for _ in range(4)]), nn.Linear(16, v)
    def forward(self, t):
        return self.out(self.blocks(self.words(t) + self.places(torch.arange(t.shape[1], device=t.device))))
"""


def forward(body: str, base: str = "Model") -> str:
    return (
        f"class Odd({base}):\n    def forward(self, t):\n        {body}\ndef f(vocab_size):\n    return Odd(vocab_size)"
    )


def made(expression: str) -> str:
    return f"def f(vocab_size):\n    {expression}"


#: What the file says -> what the line has after the name.
CASES = [
    ("sys.exit(3)", "my.py:18: ends the program by sys.exit(3); raise an exception that says why"),
    ("raise SystemExit", "my.py:18: ends the program by sys.exit(); raise an exception that says why"),
    ("raise BaseException('no')", "my.py:18: BaseException: no"),
    ("def f(:", "SyntaxError: "),
    ("import not_there_at_all", "my.py:18: ModuleNotFoundError: No module named 'not_there_at_all'"),
    ("1 / 0", "my.py:18: ZeroDivisionError: division by zero"),
    ("g = 1", "my.py has no function of that name; it has Block, Model"),
    ("f = 1", "my.py f is no function that makes a module"),
    ("f = Model(4)", "my.py f is no function that makes a module"),
    (made("sys.exit('set a path')"), "my.py:19: ends the program by sys.exit('set a path'); raise an exception that"),
    (made("return None"), "returns NoneType; a torch.nn.Module is wanted"),
    (made("return Model(vocab_size), 1"), "returns tuple; a torch.nn.Module is wanted"),
    (made("return Model"), "returns type; a torch.nn.Module is wanted"),
    (made("yield Model(vocab_size)"), "returns generator; a torch.nn.Module is wanted"),
    ("async " + made("return Model(vocab_size)"), "returns coroutine; a torch.nn.Module is wanted"),
    (made("raise ValueError('one\\ntwo')"), "my.py:19: ValueError: one"),
    (made("assert vocab_size == 3"), "my.py:19: AssertionError: assert vocab_size == 3"),
    (made("return f(vocab_size)"), "RecursionError: maximum recursion depth exceeded"),
    ("def f(depth):\n    return 1", "takes depth, which has no default"),
    ("def f():\n    return nn.Identity()", "Identity has no parameters; there is nothing to train"),
    (
        made("return Model(vocab_size).requires_grad_(False)"),
        "Model has no parameter that learns (requires_grad); there is nothing to train",
    ),
    (
        made("return Model(vocab_size, rows=10)"),
        "words.weight has 10 rows, the tokenizer 64 ids; let the factory take vocab_size",
    ),
    (
        forward("return self.out(self.words(t.clone().view(-1)).view(*t.shape, 16))").replace(
            "return Odd(vocab_size)", "return Odd(vocab_size, rows=63)"
        ),
        "words.weight has 63 rows, the tokenizer 64 ids; let the factory take vocab_size",
    ),
    (
        forward("return self.out(self.words.weight[t])").replace("Odd(vocab_size)", "Odd(vocab_size, rows=63)"),
        "words.weight has 63 rows, the tokenizer 64 ids; let the factory take vocab_size",
    ),
    (
        made("return Model(vocab_size, positions=4)"),
        "places.weight has 4 rows, and row 7 is looked up; let the factory take seq_length",
    ),
    (
        made("return nn.Sequential(nn.Embedding(vocab_size, 8), nn.LazyLinear(vocab_size))"),
        "1.weight is lazy and has no shape yet; call the module once in the factory",
    ),
    (made("m = nn.Module(); m.p = nn.Linear(2, 2); return m"), "Module: somewhere inside cannot be traced"),
    (forward("sys.exit(1)"), "ends the program by sys.exit; raise an exception that says why"),
    (forward("raise ValueError('never')"), "raise ValueError('never') cannot be traced: never"),
    (forward("assert t.shape[1] < 8, 'too long'; return t"), "cannot be traced: too long"),
    (forward("return super().forward(t) if t.sum() > 0 else None"), "depends on values of the input"),
    (forward("return super().forward(t), 1"), "Odd: returns tuple; a tensor is wanted, or something with .logits"),
    (forward("return {'logits': super().forward(t)}"), "Odd: returns dict; a tensor is wanted"),
    (forward("return self.words(t)"), "returns logits of 16 ids, the tokenizer has 64"),
    (forward("return super().forward(t).sum()"), "returns [] for tokens [2, 8]; logits [2, 8, vocabulary] are wanted"),
]
FLAGS = (
    "--seq-length 8 --micro-batch-size 2 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64"
)


def look(folder: Path, text: str, *, look: bool = True, stages: int = 1) -> ForeignModel:
    file = folder / "my.py"
    file.write_text(IMPORTS + MODEL + text + "\n")
    config = parse([*FLAGS.split(), "--model-module", f"{file}:f"])
    program = build_program("1f1b", stages, stages)
    device = torch.device("meta" if look else "cpu")
    return ForeignModel(config, Axis.single("tp"), program, device, torch.float32, ContextAxes(), probe=not look)


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "start"])
@pytest.mark.parametrize(("text", "line"), CASES, ids=[row[0].split("\n")[-1].strip()[:60] for row in CASES])
def test_what_cannot_be_trained_is_one_line(text: str, line: str, dry: bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        look(tmp_path, text, look=dry)
    (found,) = caught.value.problems
    assert found.startswith(f"--model-module={tmp_path}/my.py:f: ") and line in found and "\n" not in found


def test_values_are_wanted_where_there_is_more_than_a_look(tmp_path: Path) -> None:
    text = made("\n    with torch.device('meta'):\n        return Model(vocab_size)")
    look(tmp_path, text)
    with pytest.raises(ConfigError, match=r"words.weight is on meta, without values; make it on the CPU$"):
        look(tmp_path, text, look=False)


def test_more_stages_than_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"7 layers: 64 stages .*; use a smaller --pipeline-model-parallel-size$"):
        look(tmp_path, made("return Model(vocab_size)"), stages=64)


#: What looks odd and is right.
LEGAL = [
    made("return Model(vocab_size)"),
    made("return Model(vocab_size).double()"),
    made("return Model(vocab_size, rows=100, positions=9)"),
    made("m = Model(vocab_size); m.blocks[0].up.weight = m.blocks[1].up.weight; return m"),
    made("m = Model(vocab_size); m.out.weight = m.words.weight; return m"),
    made("m = Model(vocab_size); m.register_buffer('n', torch.zeros(1)); return m"),
    made("m = Model(vocab_size); m.spare = nn.Linear(3, 3); return m"),
    made("m = Model(vocab_size); m.blocks[0].register_forward_hook(lambda *a: a[2] * 1.0); return m"),
    made("print('x' * 100000); return Model(vocab_size)"),
    made("m = Model(vocab_size); m.words.requires_grad_(False); return m"),
    forward("return self.out(self.words(t % 10) * 1.0)").replace("Odd(vocab_size)", "Odd(vocab_size, rows=10)"),
    forward("return self.out(self.words(t.clamp(max=9)))").replace("Odd(vocab_size)", "Odd(vocab_size, rows=10)"),
    forward("t.add_(0); return super().forward(t)"),
]


@pytest.mark.parametrize(
    "text", LEGAL, ids=[text.split("\n")[-1].strip()[:60] + str(n) for n, text in enumerate(LEGAL)]
)
def test_what_is_right_is_not_refused(text: str, tmp_path: Path) -> None:
    assert look(tmp_path, text).count([0]) > 0
