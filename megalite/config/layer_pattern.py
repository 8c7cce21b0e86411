"""Which layers have something that others have not: `--window-attn-skip-freq`, `--no-rope-freq`,
`--moe-layer-freq`.

Megatron-LM's two forms: a number N speaks of every N-th layer, a list of 0 and 1 of each layer::

    4                    ...#...#      layers 4, 8, ... counted from 1
    ([1]*3+[0])*2        ###.###.      sums of lists, and lists times numbers
    1,0,0                #..
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby

from megalite.errors import ConfigError

LONGEST_TEXT = 2000


@cache
def layer_pattern(flag: str, text: str, num_layers: int) -> tuple[int, ...] | int:
    """A 0 or 1 for each layer, or N. Raises ConfigError where the text is neither, or a list of another length."""
    if re.fullmatch(r"0*[1-9]\d{0,8}", text.strip()):
        return int(text)
    try:
        node = ast.parse(text.strip() if len(text) <= LONGEST_TEXT else "", mode="eval").body
        found = _entries(ast.List(list(node.elts)) if isinstance(node, ast.Tuple) else node, num_layers)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        example = "([1]*3+[0])*2"
        raise ConfigError(
            f"{flag}={text}: neither a number above 0 nor a list of 0 and 1; '{example}' is one"
        ) from None
    if len(found) != num_layers:
        count = f"{len(found)} entries for" if len(found) < num_layers else "more entries than"
        raise ConfigError(f"{flag}={text}: {count} `num_layers`={num_layers}; give one for each layer")
    return tuple(found)


def pattern_text(layers: Iterable[bool]) -> str:
    """The list that says it of each layer."""
    runs = [(int(value), len(list(run))) for value, run in groupby(layers)]
    return "+".join(f"[{value}]" if number == 1 else f"[{value}]*{number}" for value, number in runs)


def _entries(node: ast.expr, most: int) -> list[int]:
    """The list that an expression stands for, one entry more than `most` at most."""
    if isinstance(node, ast.List):
        values = [entry.value for entry in node.elts if isinstance(entry, ast.Constant)]
        entries = [value for value in values if type(value) is int and value in (0, 1)]
        if len(entries) == len(node.elts):
            return entries[: most + 1]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_entries(node.left, most) + _entries(node.right, most))[: most + 1]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        lists, times = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        if isinstance(times, ast.Constant) and type(times.value) is int:
            entries = _entries(lists, most)
            return (entries * min(times.value, most // max(1, len(entries)) + 1))[: most + 1]
    raise ValueError("no list")
