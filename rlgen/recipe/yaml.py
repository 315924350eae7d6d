"""YAML text to plain data, with the place of every key. PyYAML composes the nodes; nothing in a file is ever constructed.

Scalars are read as in YAML 1.2: `1e-6` is a number, `no` and `010` are not a boolean and an octal number. An anchor may be
used again, within the bounds below; `<<` is no key of a recipe, which has `extends` for that.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlgen.errors import Problem

Path = tuple[str | int, ...]

BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULLS = {"", "~", "null", "Null", "NULL"}
INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # an escape can write it; no file name has it, and UTF-8 does not
PLAIN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
MAX_NODES, MAX_DEPTH = 12_000, 50  # keys and values together, repeated anchors counted each time
MAX_QUOTED = 300  # characters of a file that a message repeats
TOO_LARGE = "too large or too deep for a recipe"


class _Loader(yaml.BaseLoader):
    """Stops while it reads: PyYAML calls itself for every level, and takes seconds for a hundred thousand nodes."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, TOO_LARGE, self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass(slots=True)
class Document:
    """Plain data, and where its keys and items stand."""

    data: Any
    places: dict[Path, str] = field(default_factory=dict)  # "FILE:LINE:COL"
    problems: list[tuple[tuple[int, int], Problem]] = field(default_factory=list)  # by line and column


def parse(text: str, name: str) -> Document:
    """Reads one document. Its problems are collected, not raised: the rest of the file is still checked.

    Args:
        name: what stands before line and column in messages.
    """
    document = Document(None)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = " ".join(part for part in (error.context, error.problem) if part)
        what = TOO_LARGE if what == TOO_LARGE else f"not YAML: {shortened(what, MAX_QUOTED)}"  # it may quote a name of any length
        document.problems.append(((line, column), Problem(f"{name}:{line}:{column}", what)))
        return document
    except yaml.YAMLError as error:  # characters that YAML does not allow
        document.problems.append(((1, 1), Problem(name, f"not YAML: {' '.join(str(error).split())}")))
        return document
    if root is not None:
        reader = _Reader(name, document)
        document.data = reader.value(root, ())
    return document


class _Reader:
    """Walks the nodes of one document."""

    def __init__(self, name: str, document: Document) -> None:
        self.name = name
        self.document = document
        self.nodes = 0

    def complain(self, node: yaml.Node, what: str, hint: str | None = None) -> None:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        self.document.problems.append(((line, column), Problem(f"{self.name}:{line}:{column}", what, hint)))

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            if self.nodes <= MAX_NODES + 1:
                self.complain(node, TOO_LARGE, "remove anchors that repeat or contain themselves")
                self.nodes = MAX_NODES + 2
            return None
        self.document.places.setdefault(path, f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}")
        if node.tag not in PLAIN_TAGS:
            self.complain(node, f"the tag {node.tag[:MAX_QUOTED]} is not allowed", "write plain values")
            return None
        if isinstance(node, yaml.ScalarNode):
            if NO_TEXT.search(node.value):
                self.complain(node, "holds a character that no text has", "remove the escape")
                return None
            return scalar(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)  # there is no fourth kind
        return self.mapping(node, path)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or NO_TEXT.search(key_node.value):
                self.complain(key_node, "a key must be plain text")
                continue
            key = key_node.value
            line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if key in first:
                self.complain(key_node, f"`{shortened(key)}` stands twice, first in line {first[key]}", "remove one")
                continue
            first[key] = line
            self.document.places[(*path, key)] = f"{self.name}:{line}:{column}"
            result[key] = self.value(value_node, (*path, key))
        return result


def shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def scalar(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if INT.fullmatch(text):
        return int(text) if len(text) < 20 else float(text)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    if special := SPECIAL.fullmatch(text):
        return float(f"{special[1]}inf") if special[2] else float("nan")
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `scalar` would read as something else."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if isinstance(scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(data: Any) -> str:
    """Plain data to YAML that `parse` reads back as the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
