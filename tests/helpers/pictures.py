"""Pictures, and prompts about them for `tiny:idefics3`."""

import hashlib
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image as Pillow

from rlgen.models.load import load_config, load_tokenizer, locate
from rlgen.models.vision import Vision
from rlgen.types import Ids, Image, ids_of

MODEL = "tiny:idefics3"


def picture(seed: int, width: int = 20, height: int = 16) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def vision() -> Vision:
    folder = locate(MODEL)
    return Vision.open(folder, None, load_config(folder, None))


def asked(text: str, pictures: Sequence[bytes], seen: Vision) -> tuple[Ids, tuple[Image, ...]]:
    """The ids of pictures and a text after them, and where the pictures stand."""
    ids: list[int] = [258]
    images = []
    for data in pictures:
        own = seen.ids(data)
        images.append(Image(sha256=hashlib.sha256(data).hexdigest(), data=data, start=len(ids), stop=len(ids) + len(own)))
        ids += own
    ids += load_tokenizer(locate(MODEL), None)(text, add_special_tokens=False)["input_ids"]
    return ids_of(ids), tuple(images)
