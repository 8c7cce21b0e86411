"""Texts are plain English in the terms of the field: no banned phrase (spelling is codespell's, in scripts/test.sh)."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Pattern -> what to write instead.
BANNED = {
    r"can not": "cannot",
    r"for ever": "forever",
    r"(goes|go|went|going) on (with|from|by)": "continues with, from",
    r"training goes on": "training continues",
    r"the other way round": "vice versa, or the other direction",
    r"has need|have need": "needs",
    r"stands (twice|against)": "appears twice, prevents",
    r"where (it|they) (lies|lie|stands|stand)": "its position",
    r"above so many|at least so many": "this many",
    r"has not run empty": "did not drain",
    r"nobody (knows|asks|tells)": "unknown, is requested, is reported",
    r"of another kind than": "a different kind from",
    r"is no (section|dictionary|checkpoint)": "is not a",
    r"what it is of": "the thing's name",
    r"runs empty (with|between|for)": "drains",
    r"(reductions?|messages?|sums?|gather|training was) under way": "in flight, has begun",
    r"(takes?|took) up (a|the) (checkpoint|scale)": "loads, continues with",
    r"goes? on (after|anyway)": "continues",
    r"for good": "permanently, until the end",
    r"so many consecutive": "this number of consecutive",
    r"stands? (twice|in the way|in a partial file)": "is",
    r"is told (percents|apart|so)": "is called with, is distinguished, is reported",
}
ANY_BANNED = re.compile(r"\b(?:" + "|".join(BANNED).replace(" ", r"\s+(?:#:?\s+)?") + r")\b")
SUFFIXES = {".py", ".md", ".yaml", ".sh", ".sbatch", ".toml"}


def texts() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [
        ROOT / name for name in listed.splitlines() if Path(name).suffix in SUFFIXES and name != "tests/test_words.py"
    ]


def found_in(text: str) -> list[tuple[int, str]]:
    """(Line, banned phrase) of each one; a phrase may be broken over two lines."""
    return [(text.count("\n", 0, hit.start()) + 1, hit[0]) for hit in ANY_BANNED.finditer(text.lower())]


def test_no_banned_phrase() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(phrase.split())!r}"
        for path in texts()
        if path.is_file()
        for line, phrase in found_in(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(["write it in plain English (tests/test_words.py says how):", *problems])


def test_the_check_sees_a_phrase_across_lines() -> None:
    assert found_in("a tensor\n# that can\n# not be read") == [(2, "can\n# not")]
    assert found_in("it cannot be read; training continues") == []
