"""Calls in the forms of the usual families, whole, broken and not at all."""

import pytest
from tool_templates import FAMILIES

from rlgen.errors import SetupError
from rlgen.recipe.data import ToolFormat
from rlgen.tools.box import ToolCall
from rlgen.tools.formats import FORMATS, Malformed, format_of, read_turn

ADD = ToolCall("add", {"a": 1, "s": 'x "1"'})
SCHEMA = {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}}
GIVEN = '{"a": 1, "s": "x \\"1\\""}'
JSON = f'{{"name": "add", "arguments": {GIVEN}}}'
QWEN = '<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx "1"\n</parameter>\n</function>'
GLM = 'add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>x "1"</arg_value>'
WHOLE: list[tuple[ToolFormat, str]] = [
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call>"),
    ("hermes", f"<tool_call>{JSON}"),
    ("qwen_xml", f"<tool_call>\n{QWEN}\n</tool_call>"),
    ("glm", f"<tool_call>{GLM}\n</tool_call>"),
    ("llama", JSON.replace("arguments", "parameters")),
    ("llama", f"<|python_tag|>{JSON.replace('arguments', 'parameters')}"),
    ("mistral", f"[TOOL_CALLS][{JSON}]"),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{GIVEN}"),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{GIVEN}"),
    ("deepseek", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{GIVEN}\n```<｜tool▁call▁end｜>"),
    ("deepseek", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{GIVEN}<｜tool▁call▁end｜>"),
    ("kimi", f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{GIVEN}<|tool_call_end|>"),
    ("phi", f"<|tool_call|>[{JSON}]<|/tool_call|>"),
    ("phi", f"<|tool_call|>[{JSON}]"),
    ("lfm", "<|tool_call_start|>[add(a=1, s='x \"1\"')]<|tool_call_end|>"),
    ("gemma", '<start_function_call>call:add{a:1,s:<escape>x "1"<escape>}<end_function_call>'),
    ("gemma", '<|tool_call>call:add{a:1,s:<|"|>x "1"<|"|>}<tool_call|>'),
    ("harmony", f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{GIVEN}<|call|>"),
]


@pytest.mark.parametrize(("form", "text"), WHOLE)
def test_a_call_is_read(form: ToolFormat, text: str) -> None:
    assert read_turn(form, text, schemas=[SCHEMA]).calls == (ADD,)
    thought = read_turn(form, f"<think>or {text}?</think>{text}", schemas=[SCHEMA])
    assert thought.calls == (ADD,) and thought.content == "" and thought.thinking == f"or {text}?"
    assert read_turn(form, f"or {text}?</think>{text}", opened=True, schemas=[SCHEMA]).calls == (ADD,)
    assert read_turn(form, text, opened=True, schemas=[SCHEMA]).calls == ()  # it has never stopped thinking


def test_every_form_is_read() -> None:
    assert {form for form, _ in WHOLE} == set(FORMATS)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>'),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}</tool_call>'),
        ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("glm", "<tool_call>add me</tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        # In time that is linear in their length: these would take minutes.
        ("glm", "<tool_call>add" + "<arg_key>a</arg_key><arg_value>" * 20_000),
        ("qwen_xml", "<tool_call><function=add>" + "<parameter=a>" * 20_000 + "</function></tool_call>"),
        ("gemma", "<start_function_call>call:add{a:" + " " * 9_000 + "<}<end_function_call>"),
        ("glm", "<tool_call> <arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("llama", '{"name": "add", "parameters": {"a": '),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_end|>"),
        ("phi", "<|tool_call|>[{}]"),
        ("lfm", "<|tool_call_start|>[__import__('os').abort()]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[add(a={[]: 1})]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[add(a={(1, 2): 3})]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[add(a=0x" + "f" * 5000 + ")]<|tool_call_end|>"),
        ("gemma", "<start_function_call>call:add{a}<end_function_call>"),
        ("harmony", "to=functions.add<|message|>{<|call|>"),
    ],
)
def test_a_broken_call_is_malformed(form: ToolFormat, text: str) -> None:
    (call,) = read_turn(form, text).calls
    assert isinstance(call, Malformed) and call.why and len(call.why) <= 200


@pytest.mark.parametrize("text", ["", "12", "{}", '{"answer": 12}', "It is {12}.", "<think>hm"])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_call_is_none(form: ToolFormat, text: str) -> None:
    assert read_turn(form, text).calls == ()


def test_several_calls_keep_their_order_and_leave_what_is_said() -> None:
    turn = read_turn(
        "hermes", f'First. <tool_call>{JSON}</tool_call> Then <tool_call>{{"name": "b"}}</tool_call><tool_call>x</tool_call>'
    )
    assert turn.calls[:2] == (ADD, ToolCall("b", {})) and isinstance(turn.calls[2], Malformed)
    assert turn.content == "First.  Then <tool_call>x</tool_call>"


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.said is None])
def test_the_template_says_which_form(name: str) -> None:
    assert format_of(FAMILIES[name].template, None) == FAMILIES[name].format


def test_an_unknown_form_is_refused_unless_the_recipe_says_it() -> None:
    with pytest.raises(SetupError, match=r"set data\.tool_format to one of qwen_xml, glm, hermes"):
        format_of(FAMILIES["chatml"].template, None)
    assert format_of(FAMILIES["chatml"].template, "llama") == "llama"
