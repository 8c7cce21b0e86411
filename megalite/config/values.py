"""Text of a flag or a YAML scalar -> value of a field's type, with a line for the user where that fails.

The text of both is read by one set of rules, so that `lr: 1e-3` (a string to YAML 1.1) and `--lr 1e-3` mean the same.
"""

import difflib
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation, Overflow
from typing import Any

from megalite.config.batch_size import UNITS
from megalite.config.data import TOKENIZER_ALIASES
from megalite.config.parallel import SCHEDULE_ALIASES
from megalite.config.schema import Option
from megalite.files import url_problem

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")

#: Other names of choices, by field.
_CHOICE_ALIASES = {
    "pipeline_schedule": SCHEDULE_ALIASES,
    "optimizer": {"adamw": "adam", "dist_muon": "muon"},
    "tokenizer_type": TOKENIZER_ALIASES,
    "moe_token_dispatcher_type": {"allgather": "alltoall", "alltoall_seq": "alltoall"},
    "activation": {"swish-glu": "swiglu", "gelu_tanh": "gelu-tanh", "squared_relu": "squared-relu"},
}


class BadValue(Exception):
    """A text that is no value of its field; the message is what stands after `--flag=text: `."""


def show(value: Any) -> str:
    """Write a value as a user would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(show(item) for item in value)
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def as_typed(flag: str, value: Any) -> str:
    """Write a flag with its value as messages name it: `--train-iters=100`, `--bf16`."""
    return flag if value is True else f"{flag}={show(value)}"


def convert(option: Option, text: str) -> Any:
    """Read one value (or item). Raises BadValue where it is not of the field's type, or not one of its choices."""
    if option.name == "split":  # Megatron-LM finds its numbers whatever stands around them
        text = text.strip("'\"")
    if text[:1] in ("'", '"'):
        raise BadValue("the quotation marks are part of the value; leave them out where the script keeps its flags")
    if option.kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise BadValue(f"expected true/false, got text '{text}'")
        return text.lower() in _TRUE
    if option.name == "window_size" and (pair := re.fullmatch(r"\(?(\d+),0\)?", text.replace(" ", ""))):
        return int(pair[1]) + 1  # Megatron-LM's: tokens before and after
    if option.kind is int:
        return _integer(text, UNITS if option.facts.get("units") else {})
    if option.kind is float:
        return _number(text)
    if option.choices is not None:
        return _choice(option, text)
    if not text or any(sign in text for sign in "\0\r\n"):
        raise BadValue("expected a text of one line, without NUL" if text else "expected a value")
    if option.names_a_file and (problem := url_problem(text, stores=option.facts.get("stores", False))) is not None:
        raise BadValue(problem)
    return text


def bounds_problem(option: Option, value: Any) -> str | None:
    """Check the bounds of a field; returns the text after `--flag=value: `, or None where all is well."""
    facts = option.facts
    if option.choices is not None and value is not None:
        if value not in option.choices and value not in _CHOICE_ALIASES.get(option.name, {}):
            return f"choose {_either(option.choices)}"
    if value is None or isinstance(value, (bool, str)):
        return None
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str):
            continue
        if option.kind is int and "ge" in facts and "le" in facts and facts["le"] - facts["ge"] < 10:
            if not facts["ge"] <= item <= facts["le"]:
                return f"choose {_either(tuple(str(n) for n in range(facts['ge'], facts['le'] + 1)))}"
            continue
        above = item >= facts.get("ge", item) and item > facts.get("gt", -math.inf)
        below = item <= facts.get("le", item) and item < facts.get("lt", math.inf)
        if not above or not below:
            signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
            bounds = " and ".join(f"{sign} {show(facts[name])}" for name, sign in signs.items() if name in facts)
            return f"must be {bounds}; {facts.get('hint') or _nearest(option, 'le' if above else 'ge')}"
    return None


def _nearest(option: Option, bound: str) -> str:
    """What to write instead of a value beyond `bound`: the bound where it is legal itself, else the default."""
    value = option.facts.get(bound, option.default)
    return "leave it out" if value is None else f"try {show(value)}"


def _integer(text: str, units: Mapping[str, int]) -> int:
    unit, more = units.get(text.strip()[-1:].upper(), 1), ", nor one that ends in K, M, G, B or T" * bool(units)
    try:
        exact = Decimal(text.strip()[:-1] if unit > 1 else text.strip()) * unit
    except (InvalidOperation, Overflow):
        raise BadValue(f"not an integer{more}") from None
    # 1e9 is a fair way to write a token count; 1e999999999 is not.
    if not exact.is_finite() or exact.adjusted() > 30 or exact != exact.to_integral_value():
        raise BadValue(f"not an integer{more}")
    return int(exact)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadValue("not a number") from None
    if not math.isfinite(value):
        raise BadValue("not a finite number")
    return value


def _choice(option: Option, text: str) -> str:
    choices = option.choices
    assert choices is not None
    lowered = text.lower()
    alias = _CHOICE_ALIASES.get(option.name, {}).get(lowered)
    if alias is not None:
        return alias
    for choice in choices:
        if choice.lower() == lowered:
            return choice
    known = option.facts.get("elsewhere", {}).get(lowered)
    if known is not None:
        raise BadValue(known)
    small = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(lowered, small, n=1, cutoff=0.75)
    near += [name for name in small if len(lowered) > 3 and lowered in name]  # a part of it
    hint = f"; did you mean {small[near[0]]}?" if near else ""
    raise BadValue(f"choose {_either(choices)}{hint}")


def _either(choices: tuple[str, ...]) -> str:
    if len(choices) == 1:
        return choices[0]
    return ", ".join(choices[:-1]) + " or " + choices[-1]
