"""Images of a batch: embedded as the model itself does, in their places alone, and no more of them held than are asked for."""

import copy
import io
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import CPU
from helpers.pictures import MODEL, asked, picture, vision
from helpers.samples import make_sample
from PIL import Image as Pillow

from rlgen.errors import DataError, SetupError
from rlgen.models import vision as module
from rlgen.models.load import load_model, locate
from rlgen.models.policy import Policy
from rlgen.models.vision import decoded, of_vision, with_placeholders
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.types import WHOLE, Image, Sample


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    yield Policy(load_model(locate(MODEL), None, torch.float32, "sdpa", CPU), torch.float32, True, vision())


def sample(policy: Policy, text: str, pictures: list[bytes], answer: tuple[int, ...] = (70, 71, 72)) -> Sample:
    ids, images = asked(text, pictures, policy.vision)
    return make_sample(prompt_ids=ids, completion_ids=answer, sampler_logp=(-1.0,) * len(answer), images=images)


def logp(policy: Policy, samples: list[Sample]) -> list[torch.Tensor]:
    columns = Samples.of(samples, ())
    with torch.no_grad():
        scores = policy(collate(columns, range(len(samples)), CPU), (WHOLE,)).logp[0]
    return [row[: len(one.completion_ids)] for row, one in zip(scores, samples, strict=True)]


def test_a_mixed_batch_is_what_the_model_itself_computes(policy: Policy) -> None:
    """Rows of no, one and two images, in one batch; the model gets each by itself, with the tensors of its own processor."""
    pictures = [picture(1), picture(2, 30, 30), picture(3)]
    rows = [sample(policy, "what?", pictures[:1]), sample(policy, "a longer text", []), sample(policy, "and?", pictures[1:])]
    for row, found, own in zip(rows, logp(policy, rows), (pictures[:1], [], pictures[1:]), strict=True):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids]).astype(np.int64))[None]
        tensors = {}
        if own:
            seen = [policy.vision.processor.image_processor([[decoded(data)]], return_tensors="pt") for data in own]
            tensors = {name: torch.cat([one[name] for one in seen], 1) for name in ("pixel_values", "pixel_attention_mask")}
        with torch.no_grad():
            logits = policy.model(input_ids=ids, **tensors).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        assert torch.allclose(found, expected, atol=1e-5)


def test_bfloat16_rounds_pixels_too(policy: Policy) -> None:
    """The tower's first layer refuses float32 pixels beside rounded weights."""
    rows = [sample(policy, "what?", [picture(1)]), sample(policy, "what?", [picture(2)])]
    half = Policy(load_model(locate(MODEL), None, torch.float32, "sdpa", CPU), torch.bfloat16, True, vision())
    gaps = [(one - other).abs().max() for one, other in zip(logp(policy, rows), logp(half, rows), strict=True)]
    assert all(0 < gap < 0.05 for gap in gaps)


def test_another_image_gives_other_log_probs(policy: Policy) -> None:
    one, other = logp(policy, [sample(policy, "what?", [picture(1)]), sample(policy, "what?", [picture(2)])])
    assert (one - other).abs().max() > 1e-2


def test_a_placeholder_that_was_sampled_is_an_id_like_any_other(policy: Policy) -> None:
    """The model's own forward would take the next row's image for it."""
    odd = sample(policy, "what?", [picture(1)], (70, policy.vision.token_id, 71))
    after = sample(policy, "what?", [picture(2)])
    both = logp(policy, [odd, after])
    assert torch.allclose(both[1], logp(policy, [after])[0], atol=1e-5)
    table = policy.model.get_input_embeddings().weight
    batch = collate(Samples.of([odd], ()), [0], CPU)
    embedded = policy.vision.embed(policy.model, batch.input_ids, batch.images)
    assert torch.equal(embedded[0, -2], table[policy.vision.token_id])
    image = odd.images[0]
    inside = embedded[0, image.start : image.stop]
    as_text = table[batch.input_ids[0, image.start : image.stop]]
    replaced = (inside != as_text).any(-1)
    assert torch.equal(replaced, batch.input_ids[0, image.start : image.stop] == policy.vision.token_id) and replaced.sum() == 20


def test_placeholders_for_the_engine() -> None:
    images = [Image(sha256="a", data=b"", start=1, stop=4), Image(sha256="b", data=b"", start=5, stop=7)]
    assert with_placeholders([5, 9, 7, 9, 6, 9, 7, 4, 3], images, 7) == [5, 7, 6, 7, 4, 3]
    assert with_placeholders([5, 6], (), 7) == [5, 6]


def test_ids_of_another_processor_are_refused(policy: Policy) -> None:
    row = sample(policy, "what?", [picture(1)])
    image = row.images[0]
    short = Image(sha256=image.sha256, data=image.data, start=image.start, stop=image.stop - 1)
    with pytest.raises(SetupError, match="writes 34 ids for an image, but the prompt has 33"):
        policy.vision.embed(policy.model, torch.zeros(1, 60, dtype=torch.long), [[short]])


def test_few_processed_images_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first; one that is asked for again stays."""
    seen = vision()
    rows = [Image(sha256=str(place), data=picture(place), start=0, stop=34) for place in range(4)]
    one = module.size(seen.processed(rows[0]))
    monkeypatch.setattr(module, "CACHED_BYTES", 2 * one)
    for row in (rows[1], rows[0], rows[2], rows[3]):
        seen.processed(row)
    assert list(seen._processed) == ["2", "3"] and seen._held == 2 * one
    assert copy.deepcopy(seen) is seen


def test_vision_tower_and_projector_are_told_apart(policy: Policy) -> None:
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    found = {names[id(parameter)] for parameter in of_vision(policy.model)}
    assert {name.split(".")[1] for name in found} == {"vision_model", "connector"}
    rest = set(names.values()) - found
    assert all(name.startswith(("model.text_model.", "lm_head.")) for name in rest) and len(rest) == 39


def test_images_are_upright_and_in_rgb() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # the camera was turned
    file = io.BytesIO()
    Pillow.new("L", (4, 2), 7).save(file, "JPEG", exif=exif)
    found = decoded(file.getvalue())
    assert found.size == (2, 4) and found.mode == "RGB"


def test_what_is_no_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"", b"no image", picture(1)[:60]):
        with pytest.raises(DataError, match="it is not an image that can be opened"):
            decoded(data)
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(DataError, match=r"the image is too large: .*scale it down"):
        decoded(picture(1))
