"""What becomes of each flag of Megatron-LM: `megatron_flags.txt`, as data.

Invariant: a flag is ignored only where it tunes how Megatron-LM does something, or asks for what is always so here, or
for a line of a log; what changes the model, its training or what is kept of it is read or refused.
Proof: `tests/unit/config/test_megatron_flags.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parent / "megatron_flags.txt"


@dataclass(frozen=True)
class MegatronFlag:
    """One flag of Megatron-LM.

    name: with underscores, `no_` included where that is the flag.
    verdict: `same` (read, by its own name or as another flag), `ignored` or `refused`.
    reason: why it is ignored or refused; settings in backquotes.
    takes: "" (a switch), "=" (a value) or "=*" (values); of ignored flags alone.
    values: the only values with which it is ignored; empty: any.
    otherwise: why it is refused with another.
    older: whether Megatron-LM's main no longer has it.
    """

    name: str
    verdict: str
    reason: str = ""
    takes: str = ""
    values: tuple[str, ...] = ()
    otherwise: str = ""
    older: bool = False


@cache
def megatron_flags() -> Mapping[str, MegatronFlag]:
    """All flags of the table by name, in its order."""
    flags: dict[str, MegatronFlag] = {}
    for flag in _read(TABLE.read_text(encoding="utf-8")):
        before = flags.get(flag.name)
        if before is None:
            flags[flag.name] = flag
            continue
        ignored, refused = sorted((before, flag), key=lambda each: each.verdict)
        assert (ignored.verdict, refused.verdict) == ("ignored", "refused") and ignored.values, f"{flag.name} twice"
        flags[flag.name] = replace(ignored, otherwise=refused.reason)
    return flags


def _read(text: str) -> Iterator[MegatronFlag]:
    verdict = reason = ""
    older = False
    for line in text.splitlines():
        if line == "older:":
            older = True
        elif line.startswith(" "):
            for word in line.split():
                yield from _flags(word, MegatronFlag("", verdict, reason, older=older))
        elif line and not line.startswith("#"):
            verdict, _, reason = line.partition(":")
            reason = reason.strip()


def _flags(word: str, row: MegatronFlag) -> Iterator[MegatronFlag]:
    """The flags of one word of the table."""
    name, equals, rest = word.partition("=")
    many, values = rest.startswith("*"), rest.removeprefix("*")
    row = replace(row, takes=equals + "*" * many, values=tuple(values.split("|")) if values else ())
    names = [name]
    if name[0] == "~":
        names = ["no_" + name[1:], "disable_" + name[1:]]
    elif name[0] == "+":
        names = [name[1:], "no_" + name[1:]]
    for each in names:
        yield replace(row, name=each)
