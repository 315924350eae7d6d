"""Reads the images of rows, and puts them into messages and ids. Files stay encoded: nothing here decodes pixels."""

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.types import Image

URI = "data:image/"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for an image in a text: Placeholder(token="<image>", token_id=261, ids=...)"""

    token: str
    token_id: int
    ids: Callable[[bytes], tuple[int, ...]]  # ids that the model's processor writes for an image; raises DataError


@dataclass(frozen=True, slots=True)
class Encoded:
    data: bytes
    sha256: str
    path: str | None  # None: the data set holds the bytes themselves

    @property
    def reference(self) -> dict[str, str | None]:
        """Returns what rewards and records get in place of the image."""
        return {"path": self.path, "sha256": self.sha256}


def encoded(value: Any, rows: Rows, where: str) -> list[Encoded]:
    """Returns the images of a row, which `where` names in messages. Raises DataError if one cannot be read.

    `value`: a path, relative to the file of the row; a data URI; bytes; {"bytes": ..., "path": ...}, as data sets of the hub have
    it; a list of these; or None.
    """
    every = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return [one(image, rows, f"{where}: image {place}") for place, image in enumerate(every)]


def one(value: Any, rows: Rows, where: str) -> Encoded:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith(URI):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"{where} is a data URI that is not base64: {error}") from error
    if isinstance(value, bytes):
        return Encoded(value, hashlib.sha256(value).hexdigest(), None)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where} is {type(value).__name__}; write a path, bytes, or a list of them")
    if value.startswith(("http://", "https://")):
        raise DataError(f"{where}: {value[:80]} is an address; download it, and write the path of the file")
    path = Path(value).expanduser()
    if not path.is_absolute():
        folders = {Path(file).parent for file in rows.files}
        if len(folders) != 1:
            raise DataError(f"{where}: {value} is relative, but the rows come from {len(folders)} folders; write absolute paths")
        path = folders.pop() / path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: {path} cannot be read: {error.strerror or error}") from error
    return Encoded(data, hashlib.sha256(data).hexdigest(), str(path))


def with_parts(messages: Sequence[Mapping[str, Any]] | None, count: int, where: str) -> list[dict[str, Any]] | None:
    """Returns messages whose contents are lists of parts, as chat templates of vision-language models read them.

    The row's images, `count`, stand before the text of the first message of the user, unless the messages have places for them.
    Raises DataError if they have another number of places.
    """
    if messages is None:
        return None
    said = [message for message in messages if isinstance(message["content"], list)]
    if places := sum(part["type"] == "image" for message in said for part in message["content"]):
        if places != count:
            raise DataError(f"{where}: the messages have {places} places for images, but the row has {count} images")
        count = 0
    made: list[dict[str, Any]] = []
    for message in messages:
        own = message["content"]
        parts = [dict(part) for part in own] if isinstance(own, list) else [{"type": "text", "text": own}]
        if message["role"] == "user" and count:
            parts, count = [{"type": "image"}] * count + parts, 0
        made.append({**message, "content": parts})
    if count:
        raise DataError(f"{where}: the row has {count} images, but no user's message to hold them")
    return made


def check_text(text: str, messages: Sequence[Mapping[str, Any]] | None, count: int, token: str, where: str) -> None:
    """Raises DataError if a chat template left out a text of its messages, or the text has another number of placeholders."""
    for message in messages or ():
        for part in message["content"]:
            if part["type"] == "text" and part["text"].strip() not in text:
                raise DataError(
                    f"{where}: the chat template leaves out {part['text'][:60]!r}; set another one in data.chat_template"
                )
    if (places := text.count(token)) != count:
        raise DataError(
            f"{where}: the prompt has {places} placeholders {token}, but the row has {count} images; write one for each image,"
            " and none as text"
        )


def expanded(
    ids: Sequence[int], images: Sequence[tuple[str, Sequence[int]]], token_id: int, where: str
) -> tuple[list[int], list[Image]]:
    """Returns ids with each placeholder replaced by the ids of its image, and the images' places, without their bytes. `images`:
    SHA-256 and ids of each, in their order. Raises DataError if the ids have another number of placeholders.
    """
    made: list[int] = []
    placed: list[Image] = []
    if (places := list(ids).count(token_id)) != len(images):
        raise DataError(f"{where}: the prompt's ids have {places} placeholders, but the row has {len(images)} images")
    left = iter(images)
    for token in ids:
        if token != token_id:
            made.append(token)
            continue
        sha256, own = next(left)
        placed.append(Image(sha256=sha256, data=b"", start=len(made), stop=len(made) + len(own)))
        made += own
    return made, placed
