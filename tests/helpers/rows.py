"""Data sets that a test writes, their prompts, and a tokenizer whose chat template raises and takes arguments."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlgen.data import build_prompts, load_rows
from rlgen.data.prompts import PromptStream
from rlgen.models import tiny
from rlgen.recipe.data import DataRecipe

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if think %} hm{% endif %}{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte and one special token, <s>, which the tokenizer puts before plain texts."""
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(ALPHABET))])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_of(path: Path, tokenizer: Any = None, seed: int = 0, **settings: Any) -> PromptStream:
    """The prompts of a file. The tokenizer is that of tiny models, if none is given."""
    data = DataRecipe.model_validate({"source": str(path), **settings})
    return build_prompts(data, load_rows(data, seed), tokenizer or tiny.byte_tokenizer(), seed)
