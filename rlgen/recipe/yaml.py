"""Parses YAML text to plain data, with the position of every key.

PyYAML only composes the nodes; no object in a file is constructed.

Scalars are read as in YAML 1.2: `1e-6` is a number, `no` is not a boolean and `010` is not an octal number. Anchors may be used
again, within the limits below; `<<` is not supported, since recipes have `extends`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlgen.errors import Problem

Path = tuple[str | int, ...]
Where = Callable[[Path], str]  # the position of a key, or of the nearest one above it; else the recipe's name

BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULLS = {"", "~", "null", "Null", "NULL"}
INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # characters that escapes can write, but that no file name and no UTF-8 text can hold
QUOTELESS = re.compile(r"(- )?[\w.-]+:\s+[^\"'{\[].*:(\s|$)")  # a plain value with a colon: `system: Answer: yes`
NO_VALUE = re.compile(r"\s*(- )?[\w.-]+(:\S|\s+[^:\s]+$)")  # no space after the colon, or no colon: `name:a`, `weight 0.5`
PLAIN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
MAX_NODES, MAX_DEPTH = 12_000, 50  # nodes are keys and values; a repeated anchor counts each time
MAX_QUOTED = 300  # most characters of a file that a message quotes
NO_VARIABLES = "a recipe knows no variables: write the value itself"
TOO_LARGE = "too large or too deep for a recipe"


class _Loader(yaml.BaseLoader):
    """Stops at MAX_NODES and MAX_DEPTH while PyYAML reads: it recurses for every level, and takes seconds for 100,000 nodes."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node. Raises ComposerError if the document is too large or too deep."""
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, TOO_LARGE, self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass(slots=True)
class Document:
    """Plain data of a YAML document, and the position of each of its keys and items."""

    data: Any = None
    places: dict[Path, str] = field(default_factory=dict)  # "FILE:LINE:COL"
    problems: list[Problem] = field(default_factory=list)


def parse(text: str, name: str) -> Document:
    """Parses one document. Problems are collected, not raised, so that the rest of the file is still checked.

    Args:
        name: what precedes line and column in messages.
    """
    reader = _Reader(name)
    document = reader.document
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None  # PyYAML sets one of the two
        what = " ".join(part for part in (error.context, error.problem) if part)
        what = TOO_LARGE if what == TOO_LARGE else f"not YAML: {cut_short(what, MAX_QUOTED)}"  # the message may quote a long name
        remedy = remedy_of(what, text.splitlines(), mark.line + 1, (error.context_mark or mark).line + 1)
        document.problems.append(Problem(reader.at(mark), what, remedy))
        return document
    except yaml.YAMLError as error:  # characters that YAML does not allow
        document.problems.append(Problem(name, f"not YAML: {' '.join(str(error).split())}"))
        return document
    if root is not None:
        document.data = reader.value(root, ())
    return document


def remedy_of(problem: str, lines: list[str], number: int, begun: int) -> str | None:
    """Returns what to write instead; None if that is not clear.

    Args:
        problem: what PyYAML reports about line `number`, counted from 1, in what began in line `begun`.
    """
    line = lines[number - 1].strip() if number <= len(lines) else ""
    if r"'\t' that cannot start" in problem:
        return "indent with spaces, not with tabs"
    if found := re.search(r"(?:character '(.)' that cannot start|undefined alias)", problem):
        return f"put quotes around a value that begins with `{found[1] or '*'}`"
    if "unknown escape character" in problem:
        return "write `/`, or single quotes around a value with a backslash"
    if "${" in line:
        return f"{NO_VARIABLES}, with --set for what differs"
    if " //" in line:
        return "a comment begins with `#`"
    if "end of stream" in problem or "<stream end>" in problem:
        return f"close the {'quote' if 'quoted' in problem else 'bracket'} that line {begun} opens"
    if "single document" in problem:
        return "a recipe is one document: remove the line `---`"
    if "expected <block end>" in problem:
        return f"`{cut_short(line)}` is indented differently from the lines beside it: indent all keys of a section alike"
    if "but got ':'" in problem or ("mapping values are not allowed" in problem and QUOTELESS.match(line)):
        return "put quotes around a value that holds a colon"
    if "mapping values are not allowed" in problem or "could not find expected ':'" in problem:
        before = [one.strip() for one in lines[:number] if NO_VALUE.match(one)]
        return f"write a colon and a space after the key in `{cut_short(before[-1])}`" if before else None
    return None


class _Reader:
    """Converts the nodes of one document to plain data, and records positions and problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.document = Document()
        self.nodes = 0

    def at(self, mark: yaml.Mark) -> str:
        """Returns "FILE:LINE:COL"."""
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def complain(self, node: yaml.Node, what: str, hint: str | None = None) -> None:
        """Records a problem at the position of a node."""
        self.document.problems.append(Problem(self.at(node.start_mark), what, hint))

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Returns the plain data of a node, and records its position at `path`. Returns None for a node with a problem."""
        self.nodes += 1
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            if self.nodes <= MAX_NODES + 1:
                self.complain(node, TOO_LARGE, "remove anchors that repeat or contain themselves")
                self.nodes = MAX_NODES + 2
            return None
        self.document.places.setdefault(path, self.at(node.start_mark))
        if node.tag not in PLAIN_TAGS:
            self.complain(node, f"the tag {node.tag[:MAX_QUOTED]} is not allowed", "write plain values")
        elif isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        elif NO_TEXT.search(node.value):
            self.complain(node, "holds a character that text cannot hold", "remove the escape")
        else:
            return scalar(node.value) if isinstance(node, yaml.ScalarNode) and node.style is None else node.value
        return None

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        """Returns the dict of a mapping node. Records a problem for keys that are not plain text or appear twice."""
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or NO_TEXT.search(key):
                self.complain(key_node, "a key must be plain text")
            elif key in first:
                self.complain(key_node, f"`{cut_short(key)}` appears twice, first in line {first[key]}", "remove one")
            else:
                first[key] = key_node.start_mark.line + 1
                self.document.places[(*path, key)] = self.at(key_node.start_mark)
                result[key] = self.value(value_node, (*path, key))
        return result


def cut_short(text: str, length: int = 60) -> str:
    """Cuts a text to `length` characters, the last of which is then an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def scalar(text: str) -> bool | int | float | str | None:
    """Returns the value of an unquoted scalar."""
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
    """Writes YAML, and quotes texts that `scalar` would read as another type."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if isinstance(scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(data: Any) -> str:
    """Returns plain data as YAML that `parse` reads back unchanged."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def leaves(data: Any, path: Path = ()) -> list[Path]:
    """Returns the paths of all values. Lists of plain values and empty mappings count as values."""
    inner: Iterable[tuple[str | int, Any]] = data.items() if isinstance(data, dict) else ()
    if isinstance(data, list) and data and isinstance(data[0], dict):
        inner = enumerate(data)
    return [leaf for key, value in inner for leaf in leaves(value, (*path, key))] or [path]


def value_at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def by_key(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by dotted key: {"run.name": "demo", ...}."""
    return {".".join(map(str, leaf)): value_at(data, leaf) for leaf in leaves(data)}


def place_of(places: dict[Path, str], loc: Path) -> str | None:
    """Returns the position of the key at `loc`, or of the nearest key above it; None if neither has one."""
    return next((places[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in places), None)
