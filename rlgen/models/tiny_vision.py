"""Builds a tiny random model that reads images, `tiny:idefics3`, as `rlgen.models.tiny` builds those of texts."""

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from rlgen.models.tiny import END_OF_TEXT, SHAPE, TURN_START, byte_tokenizer, in_cache, save_random, special_ids

NAME = "idefics3"
BUILD = 1  # must be increased when a change here changes the bytes of the model

# Writes the parts of messages; what is a text is a text.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE = "<image>"
TOKENS = (
    *("<fake_token_around_image>", IMAGE, "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
# An image is scaled to LARGEST pixels, and seen as a whole and in tiles of 16 patches, each of which gives 4 embeddings.
TILE, PATCH, LARGEST, SCALE = 56, 14, 112, 2
VISION: dict[str, object] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": TILE, "patch_size": PATCH, "initializer_range": 0.06},
}


def build_tiny_vision() -> Path:
    """Returns the folder of `tiny:idefics3`: model, tokenizer and processor; builds it on first use."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [END_OF_TEXT, TURN_START, *TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    special = special_ids(tokenizer)
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "tie_word_embeddings": False, **SHAPE, **special}
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(text_config=text, vision_config=VISION, image_token_id=image_id, scale_factor=SCALE, **special)

    def save(folder: Path) -> None:
        save_random(config, tokenizer, folder, AutoModelForImageTextToText)
        pixels = Idefics3ImageProcessorPil(size={"longest_edge": LARGEST}, max_image_size={"longest_edge": TILE})
        seen = (TILE // PATCH) ** 2 // SCALE**2
        Idefics3Processor(pixels, tokenizer, image_seq_len=seen, chat_template=CHAT_TEMPLATE).save_pretrained(folder)

    return in_cache(NAME, [config.to_dict(), CHAT_TEMPLATE, TOKENS, LARGEST, torch.__version__, BUILD], save)
