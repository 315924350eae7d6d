"""Imports the function that an entry of `tools` names, and makes its schema, with which its arguments are checked. Runs in a
worker.

This module imports pydantic, and nothing heavier, so that a new worker starts quickly.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rlgen.errors import ToolError
from rlgen.worker_pool.failures import LONGEST_MESSAGE, Failed, described, redact_and_shorten
from rlgen.worker_pool.find import find_function, function_facts
from rlgen.worker_pool.source import FunctionSource, Loaded, Trade

TOOLS = Trade("tools", "tool", ToolError)
SECTION = re.compile(r"^\s*(Args|Arguments|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
ENTRY = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")  # "    x (int): what it is"


class WrongArguments(Exception):
    """Raised for arguments that do not fit the schema of a tool."""


@dataclass(frozen=True, slots=True)
class ToolSource(FunctionSource):
    name: str  # by which the model calls it
    args: dict[str, Any]  # of the recipe
    trade: ClassVar[Trade] = TOOLS

    def load(self) -> Loaded:
        tool, sha256 = find_function(self.use, TOOLS)
        facts = function_facts(self.use, tool, sha256, TOOLS)
        schema, checks = described_to_the_model(self, tool)
        return Loaded(replace(facts, schema=schema), partial(call_tool, tool, checks, self.args), tool_text, tool_failure)


def call_tool(tool: Callable[..., Any], checks: TypeAdapter[Any], given: Mapping[str, Any], *, arguments: dict[str, Any]) -> Any:
    """Calls a tool with the arguments that a model wrote. Raises WrongArguments if they do not fit, and whatever the tool raises.

    `given`: arguments of the recipe; the model neither sees nor sets them.
    """
    try:
        checked = checks.validate_python(arguments)
    except ValidationError as error:
        raise WrongArguments("; ".join(map(one_mistake, error.errors(include_url=False)))) from None
    return tool(**checked, **given)


def tool_text(answer: Any, size: int | None) -> dict[str, Any]:
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode()
    return {"text": text[:size], "characters": len(text)}


def tool_failure(error: BaseException) -> Failed:
    """Returns type and message of what was raised. The model reads them, so there is neither a line nor a traceback."""
    if isinstance(error, WrongArguments):
        return Failed("arguments", redact_and_shorten(str(error), LONGEST_MESSAGE))
    return Failed("memory" if isinstance(error, MemoryError) else "error", described(error))


def one_mistake(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def described_to_the_model(source: ToolSource, function: Callable[..., Any]) -> tuple[dict[str, Any], TypeAdapter[Any]]:
    """Returns the schema of a tool, as chat templates take it, and what checks arguments. Raises ToolError if the function has no
    docstring, or a parameter without a name, without a type, or of a type that JSON lacks.
    """
    where = f"tools: {source.use}"
    summary, described_parameters = docstring_parts(inspect.getdoc(function) or "")
    if not summary:
        raise ToolError(f"{where} has no docstring, from which the model learns what it does; write one")
    parameters = inspect.signature(function).parameters
    if unknown := sorted(set(source.args) - set(parameters)):
        raise ToolError(f"{where} has no parameter `{unknown[0]}`, which args gives; it has {', '.join(parameters) or 'none'}")
    open_ones = {name: one for name, one in parameters.items() if name not in source.args}
    try:
        types = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolError(f"{where}: a type cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    for name, one in open_ones.items():
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ToolError(f"{where}: a model gives arguments by name, but `{one}` has none; write named parameters")
        if name not in types:
            raise ToolError(f"{where}: parameter `{name}` has no type, which the model needs; write `{name}: str` or another")
        kind: Any = Annotated[types[name], Field(description=described_parameters.get(name))]
        fields[name] = Required[kind] if one.default is one.empty else NotRequired[kind]
    make: Any = TypedDict  # of parameters that are known only now
    arguments = make("arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(arguments)
        found = without_titles(adapter.json_schema())
    except PydanticUserError as error:
        raise ToolError(f"{where}: JSON has no type for one of its parameters: {str(error).splitlines()[0]}") from error
    found.pop("additionalProperties", None)
    for name, one in open_ones.items():
        if one.default is not one.empty:
            with suppress(TypeError, ValueError):  # it is no JSON value
                json.dumps(one.default)
                found["properties"][name]["default"] = one.default
    told = {"type": "object", "properties": {}, "required": [], **found}
    return {"type": "function", "function": {"name": source.name, "description": summary, "parameters": told}}, adapter


def docstring_parts(docstring: str) -> tuple[str, dict[str, str]]:
    """Splits a docstring in Google's style: what comes before its sections, and what its section Args says of each parameter."""
    summary: list[str] = []
    parameters: dict[str, str] = {}
    section, last, indent = "", "", 0
    for line in docstring.splitlines():
        if found := SECTION.match(line):
            section, last = found[1], ""
        elif not section:
            summary.append(line)
        elif section.startswith("Arg") and (entry := ENTRY.match(line)) and (not last or len(entry[1]) <= indent):
            indent, last = len(entry[1]), entry[2]
            parameters[last] = entry[3].strip()
        elif last and line.strip():
            parameters[last] = f"{parameters[last]} {line.strip()}"
    return " ".join(" ".join(summary).split()), parameters


def without_titles(schema: Any) -> Any:
    """Returns a schema without the titles that pydantic adds, which tell a model nothing."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_titles(part) for key, part in schema.items() if key != "title" or not isinstance(part, str)}
