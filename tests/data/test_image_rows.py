"""Rows with images: where they are read from, where they stand in a prompt, and what each mistake says."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from helpers.pictures import MODEL, picture, vision
from helpers.rows import write_lines

from rlgen.data import Placeholder, PromptStream, build_prompts, load_rows, overlap
from rlgen.errors import DataError
from rlgen.models.load import load_tokenizer, locate
from rlgen.recipe.data import DataRecipe

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def stream(source: Path, rows: Sequence[Mapping[str, Any]] | None = None, **changes: Any) -> PromptStream:
    if rows is not None:
        write_lines(source, rows)
    said = {"source": str(source), "columns": {"images": "images"}, "chat": True, "shuffle": False, **changes}
    data, seen = DataRecipe.model_validate(said), vision()
    tokenizer = load_tokenizer(locate(MODEL), None)
    return build_prompts(data, load_rows(data, 0), tokenizer, 0, images=Placeholder(seen.token, seen.token_id, seen.ids))


def test_files_bytes_and_uris_are_the_same_images(tmp_path: Path) -> None:
    """Paths relative to the file of the rows, as everywhere else in a data set that is moved as a whole."""
    (tmp_path / "pictures").mkdir()
    files = [tmp_path / "pictures" / f"{place}.png" for place in range(2)]
    for place, file in enumerate(files):
        file.write_bytes(picture(place))
    uri = "data:image/png;base64," + base64.b64encode(picture(0)).decode()
    rows = [
        {"prompt": "one", "images": "pictures/0.png"},
        {"prompt": "two", "images": ["pictures/0.png", str(files[1])]},
        {"prompt": "none", "images": None},
        {"prompt": "none again", "images": []},
        {"prompt": "by itself", "images": [uri]},
    ]
    prompts = stream(tmp_path / "rows.jsonl", rows).take(0, 5)
    seen = vision()
    own = list(seen.ids(picture(0)))
    assert len(own) == 34 and own.count(seen.token_id) == 20
    for prompt, texts, images in zip(
        prompts, ["<image>one", "<image><image>two", "none", "none again", "<image>by itself"], [1, 2, 0, 0, 1], strict=True
    ):
        assert prompt.text == TURN.format(texts) and len(prompt.images) == images
        for image in prompt.images:
            assert prompt.prompt_ids[image.start : image.stop].tolist() == own
    assert [image.data for image in prompts[1].images] == [picture(0), picture(1)]
    assert prompts[1].images[1].start == prompts[1].images[0].stop
    assert prompts[0].images[0].sha256 == prompts[4].images[0].sha256 != prompts[1].images[1].sha256
    # rewards and records get no bytes
    assert prompts[1].columns["images"] == [
        {"path": str(file), "sha256": image.sha256} for file, image in zip(files, prompts[1].images, strict=True)
    ]
    assert prompts[4].columns["images"] == [{"path": None, "sha256": prompts[4].images[0].sha256}]
    assert prompts[0].messages == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one"}]}]


def test_images_of_datasets_stay_encoded(tmp_path: Path) -> None:
    """`datasets` would decode them to pixels."""
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict(
        {"prompt": ["one", "none"], "images": [[{"bytes": picture(3), "path": None}], []]}, features=features
    )
    table.to_parquet(tmp_path / "rows.parquet")
    prompts = stream(tmp_path / "rows.parquet").take(0, 2)
    assert [image.data for image in prompts[0].images] == [picture(3)] and prompts[1].images == ()


@pytest.mark.parametrize("kind", ["Audio", "Video"])
def test_sounds_and_videos_stay_encoded(tmp_path: Path, kind: str) -> None:
    """`datasets` would need a package to decode them, although nothing asks for them."""
    features = datasets.Features({"prompt": datasets.Value("string"), "x": getattr(datasets, kind)()})
    table = pyarrow.table({"prompt": ["one"], "x": [{"bytes": b"RIFF", "path": None}]}, features.arrow_schema)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (row,) = load_rows(DataRecipe(source=str(tmp_path / "rows.parquet")), 0).at([0])
    assert row == {"prompt": "one", "x": {"bytes": b"RIFF", "path": None}}


def test_messages_may_say_where_images_stand(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    parts = [{"type": "text", "text": "left of "}, {"type": "image"}, {"type": "text", "text": "?"}]
    chat = [{"role": "system", "content": "look"}, {"role": "user", "content": parts}]
    (prompt,) = stream(tmp_path / "rows.jsonl", [{"prompt": chat, "images": ["0.png"]}], chat=False).take(0, 1)
    assert "<|im_start|>system\nlook<|im_end|>" in prompt.text and "left of <image>?<|im_end|>" in prompt.text


def test_a_text_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    (prompt,) = stream(tmp_path / "rows.jsonl", [{"prompt": "<image> is", "images": "0.png"}], chat=False).take(0, 1)
    assert len(prompt.images) == 1 and prompt.images[0].start == 0 and prompt.prompt_ids[34:].tolist() == [220, 72, 82]


def test_prompts_differ_by_their_images(tmp_path: Path) -> None:
    """Not duplicates of each other, not in the digest that a resume compares, and not overlapping."""
    for place in range(2):
        (tmp_path / f"{place}.png").write_bytes(picture(place))
    rows = [{"prompt": "what?", "images": f"{place}.png"} for place in (0, 1, 0)]
    prompts = stream(tmp_path / "rows.jsonl", rows)
    assert prompts.counts["duplicates"] == 1
    first, second = (stream(tmp_path / f"{place}.jsonl", rows[place : place + 1]) for place in range(2))
    assert first.digest != second.digest
    assert (overlap(first, prompts), overlap(prompts, first)) == (1, 2)


ODD = {
    "missing file": ({"prompt": "a", "images": "none.png"}, r"row 0: image 0: .*none\.png cannot be read: No such file"),
    "no image": ({"prompt": "a", "images": "rows.jsonl"}, r"row 0: image 0 \(.*rows\.jsonl\): it is not an image that can"),
    "address": ({"prompt": "a", "images": "https://x/y.png"}, r"row 0: image 0: https://x/y\.png is an address; download it"),
    "number": ({"prompt": "a", "images": 7}, r"row 0: image 0 is int; write a path, bytes, or a list of them"),
    "base64": ({"prompt": "a", "images": "data:image/png;base64,###"}, "is a data URI that is not base64"),
    "too many placeholders": ({"prompt": "<image> a", "images": "0.png"}, "has 2 placeholders <image>, but the row has 1 images"),
    "placeholder as text": ({"prompt": "<image> a", "images": None}, "has 1 placeholders <image>, but the row has 0 images"),
    "places": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "images": "0.png"},
        "the messages have 2 places for images, but the row has 1 images",
    ),
    "part": (
        {"prompt": [{"role": "user", "content": [{"type": "audio"}]}], "images": None},
        r"a part of a message must be \{type: text",
    ),
    "no user": ({"prompt": [{"role": "system", "content": "a"}], "images": "0.png"}, "no user's message to hold them"),
}


@pytest.mark.parametrize("row, said", ODD.values(), ids=list(ODD))
def test_mistakes(tmp_path: Path, row: Mapping[str, Any], said: str) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    with pytest.raises(DataError, match=said):
        stream(tmp_path / "rows.jsonl", [row])


def test_a_template_that_drops_texts_is_refused(tmp_path: Path) -> None:
    """As one does that reads parts and is given texts, or the other way round."""
    from rlgen.data.images import check_text

    with pytest.raises(DataError, match="the chat template leaves out 'hello'"):
        check_text("<image>", [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], 1, "<image>", "row 0")


def test_an_image_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    prompts = stream(tmp_path / "rows.jsonl", [{"prompt": "what?", "images": "0.png"}])
    assert prompts.at(0).images[0].data == picture(0)
    (tmp_path / "0.png").write_bytes(picture(1))
    with pytest.raises(DataError, match=r"0\.png changed during the run"):
        prompts.at(0)


def test_the_prompt_with_its_image_may_be_too_long(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    rows = [{"prompt": "what?", "images": "0.png"}, {"prompt": "what?", "images": None}]
    prompts = stream(tmp_path / "rows.jsonl", rows, max_prompt_tokens=50)
    assert (prompts.counts["over_long"], prompts.counts["used"]) == (1, 1) and prompts.at(0).images == ()
