"""Reads the calls of tools out of what a model wrote, in the forms of the usual families.

The text is decoded for this alone. The sampled ids are kept, and nothing is ever made of the text again.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlgen.errors import SetupError
from rlgen.recipe.data import ToolFormat
from rlgen.tools.box import ToolCall

THINKING = re.compile(r"<think>(.*?)(</think>|\Z)", re.S)
SHOWN = 200  # characters of an error about a malformed call


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that looks like a call but is not one."""

    why: str


Found = ToolCall | Malformed


@dataclass(frozen=True, slots=True)
class Turn:
    content: str  # without thinking and calls
    thinking: str
    calls: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A form of calls: where they stand, and how one is read."""

    marks: tuple[str, ...]  # a chat template of this form has all of them
    block: re.Pattern[str]  # group 1 is what `read` takes
    read: Callable[[str], Sequence[Found] | None]  # None: it is no call after all
    frames: tuple[str, ...] = ()  # marks around all calls of a turn
    untyped: bool = False  # values have no quotes: the tool's schema says which of them are texts


def read_turn(form: ToolFormat, text: str, opened: bool = False, schemas: Sequence[Mapping[str, Any]] = ()) -> Turn:
    """Takes a turn apart.

    Args:
        text: the turn without its stop token.
        opened: the chat template has begun the turn with <think>.
        schemas: of the tools, which say what values without quotes are.
    """
    types = {schema["function"]["name"]: schema["function"]["parameters"]["properties"] for schema in schemas}
    whole = f"<think>{text}" if opened else text
    thinking = "".join(found[1] for found in THINKING.finditer(whole))
    said = THINKING.sub("", whole)
    calls: list[Found] = []
    chosen = FORMATS[form]

    def taken(found: re.Match[str]) -> str:
        read = chosen.read(found[1])
        calls.extend(convert_values(call, types) if chosen.untyped else call for call in read or ())
        return "" if read and not any(isinstance(call, Malformed) for call in read) else found[0]

    content = chosen.block.sub(taken, said)
    for frame in chosen.frames if calls else ():
        content = content.replace(frame, "")
    return Turn(content=content.strip(), thinking=thinking.strip(), calls=tuple(calls))


def format_of(template: str, said: ToolFormat | None) -> ToolFormat:
    """Returns the form of calls that the recipe sets, or that a chat template shows. Raises SetupError if none is known."""
    if said is not None:
        return said
    for name, form in FORMATS.items():
        if all(mark in template for mark in form.marks):
            return name
    raise SetupError(
        "tools: the chat template does not show how the model writes calls of tools; set data.tool_format to one of"
        f" {', '.join(FORMATS)}, or data.chat_template to a file with a template that does"
    )


def call_of(value: Any) -> Found:
    """Returns the call that a JSON object is: {"name": ..., "arguments": {...}}, or `parameters`; Malformed stays what it is."""
    if isinstance(value, Malformed):
        return value
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed("it is no object with a name and arguments")
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        given = json_of(given)
    if isinstance(given, Malformed):
        return Malformed("its arguments are no JSON")
    if not isinstance(given, dict):
        return Malformed("its arguments are no object")
    return ToolCall(value["name"], given)


def json_of(text: str) -> Any:
    """Returns the value of a JSON text, or Malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"it is no JSON: {error}"[:SHOWN])


def only(part: str, text: str) -> bool:
    """Returns whether a text is parts of this form and nothing else, in linear time whatever it holds."""
    return re.fullmatch(rf"(?>\s*+{part})*+\s*", text, re.S) is not None


def one_object(text: str) -> list[Found]:
    return [call_of(json_of(text))]


def objects(text: str) -> list[Found]:
    """Reads a JSON list of objects, or a single object."""
    value = json_of(text)
    return [*map(call_of, value if isinstance(value, list) else [value])]


def llama(text: str) -> list[Found] | None:
    """Reads objects that are the whole turn, one after another. Text that begins like one and names no function is no call."""
    found: list[Found] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return [*found, Malformed(f"it is no JSON: {error}"[:SHOWN])] if '"name"' in text else None
        if not isinstance(value, dict) or "name" not in value:
            return None
        found.append(call_of(value))
        at += len(text[at:]) - len(text[at:].lstrip("; \n\t"))
    return found


def mistral(text: str) -> list[Found]:
    """Reads a list of objects, or name[ARGS]{...} of later versions."""
    if text.lstrip().startswith(("[", "{")):
        return objects(text.strip())
    name, mark, given = text.partition("[ARGS]")
    name = name.partition("[CALL_ID]")[0]
    if not mark:
        name, mark, given = text.partition("{")
        given = mark + given
    return one_named(name.strip(), given.strip())


def one_named(name: str, arguments: str) -> list[Found]:
    """Reads a call whose name stands apart from its arguments, which are a JSON object."""
    value = json_of(arguments)
    return [value if isinstance(value, Malformed) else call_of({"name": name, "arguments": value})]


def deepseek(text: str) -> list[Found]:
    """Reads `function<sep>name`, a line, and a code block of JSON; or `name<sep>{...}` of later versions."""
    before, _, after = text.partition("<｜tool▁sep｜>")
    if before.strip() == "function":
        before, _, after = after.partition("\n")
    arguments = after.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    return one_named(before.strip(), arguments.strip())


def kimi(text: str) -> list[Found]:
    """Reads `functions.name:0<|tool_call_argument_begin|>{...}`."""
    before, _, after = text.partition("<|tool_call_argument_begin|>")
    name = before.strip().removeprefix("functions.").partition(":")[0]
    return one_named(name, after.strip())


def unquoted_value(text: str) -> Any:
    """Returns what a value without quotes is: JSON, or a text that is no JSON. Its type is checked later."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def convert_values(call: Found, types: Mapping[str, Mapping[str, Any]]) -> Found:
    """Returns the call with its texts converted to the values that they stand for, except where the tool takes a text."""
    if isinstance(call, Malformed):
        return call
    known = types.get(call.name, {})
    texts = {name for name, schema in known.items() if schema.get("type") == "string"}
    return ToolCall(call.name, {key: value if key in texts else unquoted_value(value) for key, value in call.arguments.items()})


def glm(text: str) -> list[Found]:
    """Reads a name, and pairs of <arg_key> and <arg_value>."""
    name = text.partition("<arg_key>")[0].strip()
    pair = r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    if not re.fullmatch(r"[\w.-]+", name) or not only(pair, text.strip().removeprefix(name)):
        return [Malformed("it is no name with pairs of arg_key and arg_value")]
    return [ToolCall(name, {key.strip(): value for key, value in re.findall(pair, text, re.S)})]


def qwen_xml(text: str) -> list[Found]:
    """Reads <function=name> with a <parameter=key> for each argument."""
    whole = re.fullmatch(r"\s*<function=([\w.-]+)>(.*?)</function>\s*", text, re.S)
    if not whole:
        return [Malformed("it is no <function=name> ... </function>")]
    inner = r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>"
    if not only(inner, whole[2]):
        return [Malformed("it has more than <parameter=name> ... </parameter> in it")]
    return [ToolCall(whole[1], dict(re.findall(inner, whole[2], re.S)))]


def gemma(text: str) -> list[Found]:
    """Reads call:name{key:<escape>text<escape>,other:3}, with other marks around texts in later versions."""
    text = text.replace('<|"|>', "<escape>")
    whole = re.fullmatch(r"\s*call:([\w.-]+)\{(.*)\}\s*", text, re.S)
    if not whole:
        return [Malformed("it is no call:name{...}")]
    pair = r"([\w.-]++)\s*+:\s*+(?:<escape>(.*?)<escape>|([^,<>]*+))\s*+(?:,|\Z)"
    if not only(pair, whole[2]):
        return [Malformed("its arguments are no pairs key:value")]
    found = re.finditer(pair, whole[2], re.S)
    return [ToolCall(whole[1], {one[1]: unquoted_value(one[3].strip()) if one[2] is None else one[2] for one in found})]


def lfm(text: str) -> list[Found]:
    """Reads calls as Python writes them: [f(x=1, y="a"), g()]. Nothing is run."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found: list[Found] = []
        for call in calls:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return [Malformed("it is no list of calls with named arguments")]
            given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            json.dumps(given, default=repr)  # messages hold it
            found.append(ToolCall(call.func.id, given))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        return [Malformed(f"it cannot be read: {error}"[:SHOWN])]
    return found


def harmony(text: str) -> list[Found]:
    """Reads `name <|constrain|>json<|message|>{...}`, after to=functions."""
    before, _, after = text.partition("<|message|>")
    return one_named(re.split(r"[\s<]", before.strip(), maxsplit=1)[0], after.strip())


def text_between(opening: str, closing: str) -> re.Pattern[str]:
    """Returns the pattern of what stands between two marks; the second may be missing at the end of a turn."""
    return re.compile(f"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\\Z)", re.S)


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
GEMMA = r"(?:<start_function_call>|<\|tool_call>)(.*?)(?:<end_function_call>|<tool_call\|>|\Z)"
HARMONY = re.compile(r"(?:<\|channel\|>\w+ |<\|channel\|>)?to=functions\.(.*?)(?:<\|call\|>|\Z)", re.S)

# In this order they are looked for: a template that shows a form with more marks shows those of a plainer one, too.
FORMATS: dict[ToolFormat, Format] = {
    "qwen_xml": Format(("<tool_call>", "<function="), text_between("<tool_call>", "</tool_call>"), qwen_xml, untyped=True),
    "glm": Format(("<tool_call>", "<arg_key>"), text_between("<tool_call>", "</tool_call>"), glm, untyped=True),
    "hermes": Format(("<tool_call>",), text_between("<tool_call>", "</tool_call>"), one_object),
    "deepseek": Format(
        ("<｜tool▁call▁begin｜>",), text_between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), deepseek, DEEPSEEK
    ),
    "mistral": Format(("[TOOL_CALLS]",), re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.S), mistral),
    "kimi": Format(("<|tool_call_argument_begin|>",), text_between("<|tool_call_begin|>", "<|tool_call_end|>"), kimi, KIMI),
    "lfm": Format(("<|tool_call_start|>",), text_between("<|tool_call_start|>", "<|tool_call_end|>"), lfm),
    "phi": Format(("<|tool_call|>",), text_between("<|tool_call|>", "<|/tool_call|>"), objects),
    "gemma": Format(("call:",), re.compile(GEMMA, re.S), gemma),
    "harmony": Format(("<|channel|>", "to=functions."), HARMONY, harmony),
    "llama": Format(('"parameters": ',), re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*)\Z", re.S), llama),
}
