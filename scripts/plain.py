"""Asks a saved model with transformers alone, without anything of the tool that trained it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

BATCH = 256


@torch.no_grad()
def answers(folder: Path, prompts: Sequence[str], max_new_tokens: int, sampled: bool) -> list[str]:
    """Returns what the model in a folder answers to each prompt, as a chat: at temperature 1, or greedily."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # A setting of its own: what a tool has saved beside its weights must not change how the model is asked.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampled,
        **({"temperature": 1.0, "top_k": 0} if sampled else {}),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.generation_config = settings
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + BATCH]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, generation_config=settings)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
