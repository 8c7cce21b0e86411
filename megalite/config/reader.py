"""Command line and YAML entries -> one list of `GivenOption`s: a field, its value, and where it was given.

The command line is scanned by hand: argparse stops at the first mistake, abbreviates silently and takes `-1e-4` for a
flag. Here all mistakes are collected and nothing is guessed.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megalite.config.arguments import argument_flags, argument_words, shown_flag
from megalite.config.megatron_flags import megatron_flags
from megalite.config.names import CONSTANT_FLAGS, EXTRA_OPTIONS, RENAMED, SHORT_FORMS, nearest
from megalite.config.root import all_options
from megalite.config.schema import Option
from megalite.config.values import BadValue, convert
from megalite.config.yaml_file import COMMAND_LINE, Scalar, Written
from megalite.errors import flag_of, spelled


@dataclass(frozen=True)
class GivenOption:
    """One value that a user gave.

    name: the field (or extra option) it sets.
    typed: the name as typed, with underscores and without `no_`.
    value: the converted value.
    where: `command line` or `file.yaml:7`.
    """

    name: str
    typed: str
    value: Any
    where: str


class _Name(NamedTuple):
    """What a name that may be typed sets: a field, a flag with arguments or an extra option (`target`).

    base: the name without `no_`. switch: it takes no value. many: it takes several.
    """

    target: str
    base: str
    switch: bool
    many: bool = False
    negated: bool = False


@functools.cache
def _names() -> Mapping[str, _Name]:
    """Every name that may be typed, with underscores: fields, aliases and `no_` forms."""
    options = all_options()
    found = {name: _Name(name, name, option.kind is bool, option.many) for name, option in options.items()}
    found |= {name: _Name(name, name, made.switch is not None, many=True) for name, made in argument_flags().items()}
    found |= {name: _Name(target, name, False, options[target].many) for name, target in RENAMED.items()}
    found |= {name: _Name(target, name, True) for name, (target, _) in CONSTANT_FLAGS.items()}
    found |= {name: _Name(name, name, kind is None) for name, (kind, _) in EXTRA_OPTIONS.items()}
    return {f"no_{name}": each._replace(negated=True) for name, each in found.items() if each.switch} | found


@dataclass
class Reader:
    """Converts what users typed; mistakes are collected in `problems`, their fields in `broken`, and flags of
    Megatron-LM that have no effect here in `ignored`, by what messages begin with."""

    options: Mapping[str, Option] = field(default_factory=all_options)
    names: Mapping[str, _Name] = field(default_factory=_names)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    ignored: dict[str, GivenOption] = field(default_factory=dict)

    @property
    def known(self) -> set[str]:
        """What a misspelled name may have meant."""
        return {name for name, of in self.names.items() if not (of.negated and of.target in EXTRA_OPTIONS)}

    def read_argv(self, argv: Sequence[str]) -> tuple[list[str], list[GivenOption]]:
        """Scan a command line: the files named by `--config`, in order, and what the flags set."""
        files: list[str] = []
        givens: list[GivenOption] = []
        for token, attached, values in _split(argv):
            if not token.startswith("--") or token == "--":
                self._unexpected([token, *values])
                continue
            name = token[2:].replace("-", "_")
            if name == "config":
                texts = [*attached, *values]
                files += texts
                if not texts:
                    self.problems.append("--config: expected a file name")
                continue
            known = self.names.get(name)
            texts = [*attached, *values] if known is None else self._take_values(name, known, attached, values)
            typed = Written(name, tuple(Scalar(text, "text") for text in texts), COMMAND_LINE)
            if known is not None:
                givens += self._convert(typed)
            elif not self._ignore(typed):
                self._refuse(f"unknown flag {flag_of(name)}", name, "--")
        return files, givens

    def read_entries(self, entries: Iterable[Written]) -> list[GivenOption]:
        """Convert the entries of one YAML file."""
        sections = {option.section for option in self.options.values()}
        givens: list[GivenOption] = []
        seen: dict[str, str] = {}
        for entry in entries:
            name, where, section = entry.name, entry.where, entry.section
            if section is not None and section in argument_flags():
                givens += self._entry_of(section, entry)
                continue
            known = self.names.get(name)
            if seen.setdefault(name, where) != where:  # flat and in its section
                self.problems.append(f"{where}: duplicate key '{name}' (first at {seen[name]})")
            if section is not None and section not in sections:
                guess = nearest(section, sections)
                hint = f"; did you mean '{guess}'?" if guess else f"; sections are {', '.join(sorted(sections))}"
                self.problems.append(f"{where}: unknown section '{section}'{hint}")
            elif known is None:
                if not self._ignore(entry):
                    self._refuse(f"{where}: unknown key '{name}'", name, "")
            elif section is not None and (right := self._section(known.target) or section) != section:
                self.problems.append(f"{where}: '{name}' belongs to section '{right}', not '{section}'")
            elif entry.is_list and not known.many:
                self._bad(entry, known.target, entry.label(), "expected one value, got a list")
            else:
                givens += self._convert(entry)
        return givens

    def _entry_of(self, flag: str, entry: Written) -> list[GivenOption]:
        """Convert `project: lm` of `wandb: {project: lm}`."""
        made = argument_flags()[flag]
        name = made.fields.get(entry.name)
        if name is None:
            names = ", ".join(made.fields)
            self.problems.append(f"{entry.where}: unknown key '{entry.name}' of '{flag}'; names are {names}")
            return []
        on = [] if made.switch is None else [GivenOption(made.switch, flag, True, entry.where)]
        return on + self._convert(replace(entry, name=name))

    def _section(self, target: str) -> str | None:
        """The section that a target belongs to."""
        if target in argument_flags():
            target = next(iter(argument_flags()[target].fields.values()))
        return self.options[target].section if target in self.options else None

    def _take_values(self, name: str, known: _Name, attached: list[str], values: list[str]) -> list[str]:
        """Give a flag the values it wants; what is left over belongs to no flag."""
        texts = [*attached, *values]
        if known.many and not known.negated:
            return texts
        if known.switch:
            opposite = "" if name.startswith("no_") else f"; {flag_of(f'no_{name}')} says the opposite"
            self._unexpected(values, f"{flag_of(name)} takes no value{opposite}")
            return attached
        if known.target in self.options and self.options[known.target].facts.get("words"):
            return [" ".join(texts)] if texts else []
        self._unexpected(texts[1:])
        return texts[:1]

    def _convert(self, typed: Written) -> list[GivenOption]:
        """Convert one typed name; a mistake gives an empty list."""
        target, base, switch, _, negated = self.names[typed.name]
        if base in argument_flags():
            return self._arguments(typed, base, negated)
        try:
            value = self._switch(typed, base, negated) if switch else self._value(typed, target)
            return [GivenOption(target, base, value, typed.where)]
        except BadValue as bad:
            shown = " ".join(scalar.text for scalar in typed.scalars)
            is_text = "got text" in str(bad) or "expected" in str(bad)
            self._bad(typed, target, typed.label(None if is_text else shown), str(bad))
            return []

    def _arguments(self, typed: Written, flag: str, negated: bool) -> list[GivenOption]:
        """Read `NAME=VALUE ...`, each for the field of that name."""
        made, texts = argument_flags()[flag], [scalar.text for scalar in typed.scalars]
        if made.switch is not None and (not texts or (len(texts) == 1 and typed.scalars[0].tag == "bool")):
            on = not texts or bool(convert(self.options[made.switch], texts[0]))
            return [GivenOption(made.switch, flag, on is not negated, typed.where)]
        if len(texts) == 1 and typed.scalars[0].tag == "null":
            return []
        givens = [] if made.switch is None else [GivenOption(made.switch, flag, True, typed.where)]
        for argument, text in argument_words(flag, texts):
            word = argument if text is None else f"{argument}={text}"
            name = made.fields.get(argument)
            try:
                givens.append(self._argument(typed, flag, word, name, text))
            except BadValue as bad:
                meant = name or made.fields.get(_meant(argument, made.fields) or "")
                self._bad(typed, meant, typed.label(word), str(bad))
        if not givens and not texts:
            self._bad(typed, None, typed.label(), f"expected NAME=VALUE ...; names are {', '.join(made.fields)}")
        return givens

    def _argument(self, typed: Written, flag: str, word: str, name: str | None, text: str | None) -> GivenOption:
        """Convert one word. Raises BadValue."""
        option = self.options.get(name or "")
        if option is not None and text is None:
            text = option.facts.get("alone")
        if option is None or (text is None and option.kind is not bool):
            raise BadValue(_no_argument(word, text, argument_flags()[flag].fields))
        texts = ["true" if text is None else text]
        if option.many:
            texts = texts[0].replace(",", " ").split()
        value = tuple(convert(option, each) for each in texts) if option.many else convert(option, texts[0])
        return GivenOption(option.name, f"{flag} {word}", value, typed.where)

    def _switch(self, typed: Written, base: str, negated: bool) -> Any:
        """What the switch `base` sets its field to."""
        on = True
        if typed.scalars:
            (scalar,) = typed.scalars
            if scalar.tag not in ("bool", "text"):
                raise BadValue(f"expected true/false, got text '{scalar.text}'")
            on = bool(convert(Option("", base, bool), scalar.text))
        on = on is not negated
        if base not in CONSTANT_FLAGS:
            return on
        target, value = CONSTANT_FLAGS[base]
        return value if on else self.options[target].default

    def _value(self, typed: Written, target: str) -> Any:
        option = self.options.get(target) or Option("", target, EXTRA_OPTIONS[target][0] or bool)
        if len(typed.scalars) == 1 and typed.scalars[0].tag == "null":
            if option.many and not option.optional:
                return ()
            if not option.optional:
                raise BadValue("expected a value")
            return None
        if not typed.scalars and not (option.many and typed.where != COMMAND_LINE):
            raise BadValue("expected a value")
        texts = [scalar.text for scalar in typed.scalars]
        if option.many:
            if option.kind is not str:
                texts = " ".join(texts).replace(",", " ").split()
            return tuple(convert(option, text) for text in texts)
        return convert(option, texts[0])

    def _bad(self, typed: Written, target: str | None, label: str, reason: str) -> None:
        self.problems.append(f"{label}: {reason}")
        if target is not None:
            self.broken.add(target)

    def _unexpected(self, values: list[str], why_not: str = "flags begin with --") -> None:
        for value in values:
            quoted = value[:1] in ("'", '"', "\u2018", "\u201c")
            why = "its quotation marks are part of it; leave them out" if quoted else why_not
            self.problems.append(f"unexpected argument {value if quoted else repr(value)}; {why}")

    def _ignore(self, typed: Written) -> bool:
        """Whether it is a flag of Megatron-LM that is accepted without effect; wrong values of it are reported."""
        flag, texts = megatron_flags().get(typed.name), [scalar.text for scalar in typed.scalars]
        if flag is None or flag.verdict != "ignored":
            return False
        if typed.where == COMMAND_LINE and flag.takes != "=*":
            wanted = len(flag.takes)
            self._unexpected(texts[wanted:])
            texts = texts[:wanted]
        objection = "expected a value" if flag.takes == "=" and not texts else None
        if flag.values and any(text.lower() not in flag.values for text in texts):
            objection = flag.otherwise
        if objection is not None:
            self.problems.append(f"{typed.label(' '.join(texts) or None)}: {objection}")
        else:
            self.ignored[typed.label()] = GivenOption(typed.name, typed.name, " ".join(texts), typed.where)
        return True

    def _refuse(self, what: str, name: str, dashes: str) -> None:
        """Report a name that sets nothing: known from Megatron-LM, or misspelled."""
        if " " in name and dashes:
            self.problems.append(f"{what}: a flag and its value in one word; leave out the quotes around them")
            return
        for key in (name, f"no_{name}", name.removeprefix("no_")):
            known_there = megatron_flags().get(key)
            if known_there is not None and known_there.verdict != "same":
                shown = what.replace("unknown flag ", "").replace("unknown key ", "")
                drop = "drop it: " if known_there.verdict == "ignored" else ""
                self.problems.append(spelled(f"{shown}: {drop}{known_there.reason}", shown_flag))
                return
        guess = nearest(name, self.known | ({"config"} if dashes else set()))
        shown_guess = guess.replace("_", "-") if guess and dashes else guess
        quote = "" if dashes else "'"
        hint = f"; did you mean {quote}{dashes}{shown_guess}{quote}?" if guess else "; see --help"
        self.problems.append(what + hint)


def _no_argument(word: str, text: str | None, fields: Mapping[str, str]) -> str:
    """What is wrong with a word that sets no field. fields: argument -> the field that it sets."""
    argument = word.partition("=")[0]
    if argument in fields:
        return f"expected {argument}=VALUE"
    meant = _meant(argument, fields)
    hint = "" if meant is None else f"; did you mean {meant}{'' if text is None else '=' + text}?"
    wrong = "expected NAME=VALUE," if text is None else f"no argument {argument}:"
    return f"{wrong} names are {', '.join(fields)}{hint}"


def _meant(argument: str, fields: Mapping[str, str]) -> str | None:
    """The argument that another word stands for: the name of its field, what others call that, a part of it."""
    if not argument.isidentifier():
        return None
    by_field = [name for name, field in fields.items() if field in (argument, SHORT_FORMS.get(argument))]
    begins = [name for name in fields if name.startswith(argument) or argument.endswith(f"_{name}")]
    return next(iter([*by_field, *begins]), None) or nearest(argument, fields)


def _split(argv: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Group a command line by its `--` tokens: (token, value attached by `=`, values after it)."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, attached = token.partition("=")
            groups.append((name, [attached] if equals else [], []))
        elif groups and groups[-1][0].startswith("--"):
            groups[-1][2].append(token)
        else:
            groups.append((token, [], []))
    return groups
