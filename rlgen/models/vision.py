"""Turns the images of prompts into what a vision-language model reads: ids by its processor, and embeddings by its vision tower.

The processor writes the ids of an image once, when the data is read. The trainer and the transformers engine compute the
embeddings of these ids here; vLLM computes them itself, and reports the ids that it used.
"""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin

from rlgen.errors import DataError, SetupError
from rlgen.models.half import HALF
from rlgen.types import Image

CACHED_BYTES = 256 << 20  # of pixel values that are kept, so that an image of a group is not processed for each completion


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How the processor of one architecture hands over several images."""

    inputs: tuple[str, ...]  # tensors of the processor that the vision tower takes
    axis: int  # along which those of several images are joined


# By model type. Members have a decoder with plain positions that sees images as embeddings in place of the placeholder's.
FAMILIES: Mapping[str, VisionFamily] = {"idefics3": VisionFamily(inputs=("pixel_values", "pixel_attention_mask"), axis=1)}


def reads_images(config: PreTrainedConfig) -> bool:
    """Returns whether a model of `config` is one whose images rlgen can train on."""
    return config.model_type in FAMILIES


def decoded(data: bytes) -> Any:
    """Returns the encoded image `data` as PIL has it: upright, in RGB. Engine and trainer both see what this returns.

    Raises:
        DataError: it is no image, a damaged one, or one of too many pixels.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Pillow.DecompressionBombError as error:
        raise DataError(f"the image is too large: {error}; scale it down") from error
    except (OSError, ValueError, SyntaxError) as error:  # what PIL raises for damaged files
        raise DataError(f"it is not an image that can be opened: {error}") from error


@dataclass(frozen=True, slots=True)
class Processed:
    """What the processor makes of one image."""

    ids: tuple[int, ...]  # in place of one placeholder
    tensors: Mapping[str, Tensor]


class Vision:
    """The processor of a model, and the images that it has processed last.

    Args:
        config: of a model for which `reads_images` holds.
    """

    def __init__(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        self.processor = processor
        self.token: str = processor.image_token
        self.token_id: int = config.image_token_id
        self._family = FAMILIES[config.model_type]
        self._by_size: dict[tuple[int, int], tuple[int, ...]] = {}
        self._processed: OrderedDict[str, Processed] = OrderedDict()
        self._held = 0

    def __deepcopy__(self, _: object) -> "Vision":
        """Returns itself: a copy of the policy, its reference, sees the same images."""
        return self

    @classmethod
    def open(cls, location: str, revision: str | None, config: PreTrainedConfig) -> "Vision":
        """Loads the processor of the model at `location`. Raises SetupError if it cannot."""
        try:
            processor = AutoProcessor.from_pretrained(location, revision=revision, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            said = " ".join(str(error).split())[:300]
            raise SetupError(f"data.columns.images: {location} has no processor that can be loaded: {said}") from error
        return cls(processor, config)

    def ids(self, data: bytes) -> tuple[int, ...]:
        """Returns the ids that the processor writes for an image in place of its placeholder; they follow from its size.

        Raises DataError if `data` is no image.
        """
        image = decoded(data)
        if image.size not in self._by_size:
            self._by_size[image.size] = self._process(image).ids
        return self._by_size[image.size]

    def _process(self, image: Any) -> Processed:
        made = self.processor(text=[self.token], images=[image], add_special_tokens=False, return_tensors="pt")
        return Processed(tuple(made["input_ids"][0].tolist()), {name: made[name] for name in self._family.inputs})

    def processed(self, image: Image) -> Processed:
        """Returns what the processor makes of an image, from the cache if it is there."""
        if image.sha256 in self._processed:
            self._processed.move_to_end(image.sha256)
            return self._processed[image.sha256]
        made = self._processed[image.sha256] = self._process(decoded(image.data))
        self._held += size(made)
        while self._held > CACHED_BYTES and len(self._processed) > 1:
            self._held -= size(self._processed.popitem(last=False)[1])
        return made

    def embed(self, model: PreTrainedModel, ids: Tensor, images: Sequence[Sequence[Image]], left: Sequence[int] = ()) -> Tensor:
        """Computes the input embeddings of ids: of images by the vision tower, of all others by the model's table.

        A placeholder that the model has sampled is an id like any other: only the ranges of `images` are filled.

        Args:
            ids: [B, S]
            images: of each row.
            left: padding before each row; (): none.

        Returns:
            [B, S, H]

        Raises:
            SetupError: the vision tower gives another number of embeddings than the prompt has places.
        """
        embedded: Tensor = model.get_input_embeddings()(ids)
        placed = [(row, image) for row, of_row in enumerate(images) for image in of_row]
        made = [self.processed(image) for _, image in placed]
        rows, columns = self._places(placed, made, left)
        joined = {name: torch.cat([one.tensors[name] for one in made], self._family.axis) for name in self._family.inputs}
        features = model.get_image_features(**{name: tensor.to(ids.device) for name, tensor in joined.items()}).pooler_output
        features = features.reshape(-1, features.shape[-1])
        if len(features) != len(rows):
            raise SetupError(f"model.path: {len(placed)} images have {len(rows)} placeholders, but {len(features)} embeddings")
        at = torch.tensor(rows, device=ids.device), torch.tensor(columns, device=ids.device)
        return embedded.index_put(at, features.to(embedded.dtype))

    def _places(
        self, placed: Sequence[tuple[int, Image]], made: Sequence[Processed], left: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Returns row and column of each embedding. Raises SetupError if the prompt has other ids than the processor writes."""
        rows, columns = [], []
        for (row, image), one in zip(placed, made, strict=True):
            if image.stop - image.start != len(one.ids):
                raise SetupError(
                    f"model.path: the processor writes {len(one.ids)} ids for an image, but the prompt has"
                    f" {image.stop - image.start}: they depend on more than the image's size; take another model"
                )
            first = image.start + (left[row] if left else 0)
            own = [first + place for place, token in enumerate(one.ids) if token == self.token_id]
            columns += own
            rows += [row] * len(own)
        return rows, columns


def decoder_inputs(
    vision: Vision | None, model: PreTrainedModel, ids: Tensor, images: Sequence[Sequence[Image]], left: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Returns what a decoder computes from: ids [B, S], or their embeddings if a row has images; see `Vision.embed`."""
    if not any(images):
        return {"input_ids": ids}
    assert vision is not None  # no other model is given images
    return {"inputs_embeds": vision.embed(model, ids, images, left)}


def round_pixels(model: PreTrainedModel) -> None:
    """Makes the first layer of the vision tower, whose weights `compute_in_half` rounds, round its pixels, too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(HALF),))


def size(processed: Processed) -> int:
    """Returns the bytes of the tensors of an image."""
    return sum(tensor.nbytes for tensor in processed.tensors.values())


def of_vision(model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters that are in neither the decoder nor the head: those of vision tower and projector."""
    language = {id(parameter) for part in (model.get_decoder(), model.get_output_embeddings()) for parameter in part.parameters()}
    return (parameter for parameter in model.parameters() if id(parameter) not in language)


def with_placeholders(ids: Sequence[int], images: Sequence[Image], token_id: int) -> list[int]:
    """Returns the ids of a prompt with one placeholder for each image, which vLLM's own processor expands again.

    with_placeholders([5, 9, 7, 7, 9, 6], [Image(start=1, stop=5, ...)], 7) is [5, 7, 6]
    """
    made: list[int] = []
    before = 0
    for image in images:
        made += [*ids[before : image.start], token_id]
        before = image.stop
    return [*made, *ids[before:]]
