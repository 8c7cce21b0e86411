"""YAML files that may come from anywhere -> flat list of entries, each with its line.

Only the safe subset that a configuration needs is read: scalars, lists of scalars, mappings two deep. Scalars stay
text (`values.convert` reads them by the field's type), so YAML 1.1's surprises (`1e-3` a string, `1:30` ninety,
`no` a boolean) do not exist. Aliases, tags, duplicate keys, deep nesting and large files are refused.
"""

import os
import re
from dataclasses import dataclass

import yaml

from megalite.config.arguments import argument_flags
from megalite.errors import ConfigError, flag_of

COMMAND_LINE = "command line"
MAX_BYTES = 256 * 1024
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Scalar:
    """One scalar as written. tag: what YAML 1.1 takes it for: `null`, `bool`, `int`, `float`, `str`, ..."""

    text: str
    tag: str


@dataclass(frozen=True)
class Written:
    """One name and its texts, before conversion.

    scalars: its value, or the items of a list. where: `command line` or `file.yaml:7`. section: the mapping of a file
    that it belongs to, or None at top level.
    """

    name: str
    scalars: tuple[Scalar, ...]
    where: str
    section: str | None = None
    is_list: bool = False

    def label(self, text: str | None = None) -> str:
        """What a message about this begins with."""
        value = "" if text is None else f"={text}"
        if self.where == COMMAND_LINE:
            return f"{flag_of(self.name)}{value}"
        return f"{self.where}: {self.name}{value}"


def read_yaml(path: str, problems: list[str]) -> list[Written]:
    """Read a configuration file.

    problems: takes the mistakes of single entries, and the others are returned. Raises ConfigError where the file is
    missing, too large, not YAML, or uses what a configuration does not need; the line says where (`file:line:column`).
    """
    text = _read_text(path)
    root = _compose(path, text)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{_at(path, root)}: expected 'key: value' lines")
    entries: list[Written] = []
    _collect(path, root, None, entries, problems)
    return entries


def _read_text(path: str) -> str:
    flag = f"`config`={path}"
    if not os.path.isfile(path):
        kind = "is a directory" if os.path.isdir(path) else f"no such file (cwd {os.getcwd()})"
        raise ConfigError(f"{flag}: {kind}")
    try:
        with open(path, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{flag}: larger than {MAX_BYTES // 1024} KiB, too large for a configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: not UTF-8 text (byte {error.start})") from None


def _compose(path: str, text: str) -> yaml.Node | None:
    try:
        _check_events(path, text)
        # The loader is the safe one, and nodes are never constructed into objects.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else path
        reason = error.problem or "syntax error"
        if mark is not None and any(re.match(r"\s*\t", line) for line in text.splitlines()[mark.line :][:1]):
            reason = "tab used for indentation"
        raise ConfigError(f"{place}: not valid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None


def _check_events(path: str, text: str) -> None:
    """Refuse, before any recursion, what could make reading expensive or ambiguous."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{path}:{event.start_mark.line + 1}:{event.start_mark.column + 1}" if event.start_mark else path
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(f"{place}: anchors and aliases are not allowed; write the value out")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise ConfigError(f"{place}: tags ('{tag}') are not allowed; write the plain value")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{place}: more than one document in a file")
        depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
        depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{place}: nested too deep; sections hold plain values and lists")


def _at(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _collect(
    path: str, mapping: yaml.MappingNode, section: str | None, entries: list[Written], problems: list[str]
) -> None:
    seen: dict[str, str] = {}
    for key_node, value_node in mapping.value:
        where = _at(path, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{where}: a key must be a plain name")
            continue
        key = key_node.value.replace("-", "_")
        if key in seen:
            problems.append(f"{where}: duplicate key '{key_node.value}' (first at {seen[key]})")
            continue
        seen[key] = where
        if isinstance(value_node, yaml.MappingNode):
            if section is None or key in argument_flags():
                _collect(path, value_node, key, entries, problems)
            else:
                problems.append(f"{where}: '{key_node.value}' is not a section; expected a plain value")
        elif isinstance(value_node, yaml.SequenceNode):
            if all(isinstance(item, yaml.ScalarNode) for item in value_node.value):
                items = tuple(_scalar(item) for item in value_node.value)
                entries.append(Written(key, items, where, section, is_list=True))
            else:
                problems.append(f"{where}: {key_node.value}: expected a list of plain values")
        else:
            entries.append(Written(key, (_scalar(value_node),), where, section))


def _scalar(node: yaml.Node) -> Scalar:
    return Scalar(str(node.value), node.tag.rsplit(":", 1)[-1])
