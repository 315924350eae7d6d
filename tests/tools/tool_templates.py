"""Chat templates of the usual families, written after their public formats, and tokenizers that know their special tokens."""

from dataclasses import dataclass

from tokenizers import AddedToken

from rlgen.models.tiny import byte_tokenizer

HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
)
HERMES_ANSWERS = (
    "{%- elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
HERMES_CALLS = (
    "{%- for c in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson)'
    " + '}\n</tool_call>' }}{% endfor %}"
)
QWEN25 = (
    HERMES_TOOLS + "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not tools) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}"
    + HERMES_CALLS
    + "{{ '<|im_end|>\n' }}"
    + HERMES_ANSWERS
    + "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking is kept behind the last question, and a turn that is the last one gets an empty block of it.
QWEN3 = (
    HERMES_TOOLS + "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not tools) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% set content = m.content or '' %}"
    "{% if not thought and '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    + HERMES_CALLS
    + "{{ '<|im_end|>\n' }}"
    + HERMES_ANSWERS
    + "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Answers are quoted as JSON, and a turn has one call at most.
LLAMA31 = (
    "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n<|eot_id|>' }}"
    "{% set first = messages[0].content | trim %}"
    "{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}{% for t in tools or [] %}{{ (t | tojson(indent=4)) + '\n\n' }}{% endfor %}"
    '{{ \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}'
    "{{ first + '<|eot_id|>' }}{% for m in messages[1:] %}"
    "{%- if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + (c.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}"
    "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Ids of calls have nine characters; nothing stands between an answer and the model's next turn.
MISTRAL = (
    "{{ '<s>[AVAILABLE_TOOLS]' + ((tools or []) | tojson) + '[/AVAILABLE_TOOLS]' }}{% for m in messages %}"
    "{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}"
    "{%- else %}{{ m.content + '</s>' }}{%- endif %}{% endfor %}"
)
# A call is answered within the model's turn: what begins the answer is what stops the model.
GEMMA = (
    "{{ '<bos>' }}{% for t in tools or [] %}{{ '<start_function_declaration>' + (t | tojson) + '<end_function_declaration>' }}{% endfor %}"
    "{% for m in messages %}{%- if m.role == 'tool' %}{{ '<start_function_response>response:' + m.name + '{value:<escape>' }}"
    "{{ m.content + '<escape>}<end_function_response>' }}"
    "{%- else %}{% if m.role == 'user' or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<start_function_call>call:' + c.function.name + '{' }}"
    "{% for key, value in c.function.arguments.items() %}{{ key + ':' }}"
    "{% if value is string %}{{ '<escape>' + value + '<escape>' }}{% else %}{{ value | tojson }}{% endif %}"
    "{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{{ '}<end_function_call>' }}{% endfor %}"
    "{% if not m.tool_calls %}{{ '<end_of_turn>\n' }}{% endif %}{%- endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Arguments are a text that is put in as it is.
DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for t in tools or [] %}{{ (t | tojson) + '\n' }}{% endfor %}{% set ns = namespace(out=false) %}"
    "{% for m in messages %}{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}"
    "{%- elif m.role == 'assistant' %}{{ m.content or '' }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}{% endfor %}"
)
# The token that begins an answer is what stops the model: a turn has no end of its own.
GLM = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n<tools>\n' }}{% for t in tools %}{{ (t | tojson) + '\n' }}{% endfor %}"
    "{{ '</tools>\n<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key>\n<arg_value>{arg-value}</arg_value>\n</tool_call>' }}"
    "{% endif %}{% for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name + '\n' }}{% for key, value in c.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\n' }}"
    "{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{%- endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PHI4 = (
    "{{ '<|system|>You are helpful.<|tool|>' + ((tools or []) | tojson) + '<|/tool|><|end|>' }}{% for m in messages %}"
    "{%- if m.tool_calls %}{{ '<|assistant|>' + (m.content or '') + '<|tool_call|>[' }}{% for c in m.tool_calls %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|/tool_call|><|end|>' }}"
    "{%- else %}{{ '<|' + ('tool_response' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end|>' }}{%- endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GRANITE = (
    "{% if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' }}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '<|tool_call|>[' }}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}{{ ']' }}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
LFM = (
    "{{ '<|startoftext|>' }}{% if tools %}{{ '<|im_start|>system\nList of tools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}"
    "{% for c in m.tool_calls %}{{ c.function.name + '(' }}{% for key, value in c.function.arguments.items() %}"
    "{{ key + '=' }}{% if value is string %}{{ value | tojson }}{% else %}{{ value }}{% endif %}{% if not loop.last %}{{ ', ' }}"
    "{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The generation prompt begins the thinking.
NEMOTRON = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools>\n<tool_call>\n<function=name>\n' }}"
    "{{ '<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for key, value in c.function.arguments.items() %}{{ '<parameter=' + key + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}"
    "{{ '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Knows neither tools nor calls: they are written into the text.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Family:
    """A template, its special tokens, those that end a turn, and what the template is found to show."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    format: str
    marks: tuple[str, ...] = ()  # tokens that are not special, but that no text may forge either
    thinks: bool = False
    one_call: bool = False
    says: bool = True  # a turn with a call may say something, too
    said: str | None = None  # data.tool_format


IM = ("<|im_start|>", "<|im_end|>")
QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
HERMES_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRALS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")
GEMMAS = (
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<escape>"),
    *(f"<{part}_function_{what}>" for part in ("start", "end") for what in ("call", "response", "declaration")),
)
DEEP = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin"),
        *("tool▁call▁end", "tool▁sep", "tool▁output▁begin", "tool▁output▁end"),
    )
)
GLMS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_ENDS = ("<|observation|>", "<|user|>", "<|endoftext|>")
GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PHIS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
GRANITES = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
LFMS = (*IM, "<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>")
FAMILIES = {
    "qwen2.5": Family(QWEN25, IM, QWEN_ENDS, "hermes", HERMES_MARKS),
    "qwen3": Family(QWEN3, IM, QWEN_ENDS, "hermes", HERMES_MARKS, thinks=True),
    "llama3.1": Family(LLAMA31, LLAMA, ("<|eot_id|>",), "llama", one_call=True, says=False),
    "mistral": Family(MISTRAL, MISTRALS, ("</s>",), "mistral", says=False),
    "gemma": Family(GEMMA, GEMMAS, ("<end_of_turn>", "<start_function_response>"), "gemma"),
    "deepseek": Family(DEEPSEEK, DEEP, ("<｜end▁of▁sentence｜>",), "deepseek"),
    "glm": Family(GLM, GLMS, GLM_ENDS, "glm", GLM_MARKS),
    "phi4-mini": Family(PHI4, PHIS, ("<|end|>",), "phi"),
    "granite": Family(GRANITE, GRANITES, ("<|end_of_text|>",), "phi"),
    "lfm2": Family(LFM, LFMS, ("<|im_end|>",), "lfm"),
    "nemotron": Family(NEMOTRON, IM, ("<|im_end|>",), "qwen_xml", HERMES_MARKS, thinks=True),
    "chatml": Family(CHATML, IM, ("<|im_end|>",), "hermes", said="hermes"),
}


def tokenizer_of(family: Family):
    """A tokenizer of bytes with the special tokens of a family."""
    made = byte_tokenizer()
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.special], special_tokens=True)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.marks])
    made.chat_template = family.template
    return made
