"""Checks the messages of prompts that are chats."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlgen.errors import DataError
from rlgen.recipe.data import DataRecipe

ROLES = ("system", "user", "assistant", "tool", "developer")


def as_messages(prompt: Any, data: DataRecipe, where: str) -> list[dict[str, Any]] | None:
    """Returns the messages of a prompt; None for a text that is used without a template.

    Raises DataError for what is neither a text nor a list of valid messages that ends before the assistant's turn.
    """
    system = [{"role": "system", "content": data.system}] if data.system else []
    if isinstance(prompt, str):
        if prompt.lstrip().startswith("[") and is_chat(prompt):
            raise DataError(f"{where}: the prompt is a text with a chat as JSON; write the list itself, in JSON Lines or Parquet")
        return [*system, {"role": "user", "content": prompt}] if data.chat or system else None
    if not isinstance(prompt, Sequence):
        raise DataError(f"{where}: the prompt is {type(prompt).__name__}, not a text or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise DataError(f"{where}: a message must have one of the roles {', '.join(ROLES)}: {str(message)[:80]}")
        if message.get("tool_calls"):
            raise DataError(f"{where}: a message calls tools, which a prompt must not; remove it from the data")
        content = message.get("content")
        if isinstance(content, list) and data.columns.images is None:
            raise DataError(
                f"{where}: the content of the {message['role']}'s message is a list of parts, but prompts are texts;"
                " write the text itself, or name the column of images in data.columns.images"
            )
        if isinstance(content, list):
            check_parts(message, where)
        elif not isinstance(content, str) or not content.strip():
            raise DataError(f"{where}: the message of the {message['role']} has no text")
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's, but a prompt must end before the assistant's turn; remove that"
            " message, and keep it in a column of its own if a reward needs it"
        )
    if system and prompt[0]["role"] in ("system", "developer"):
        raise DataError(f"{where}: the row has a system message of its own beside data.system; remove one of them")
    return [*system, *map(without_nulls, prompt)]


def is_chat(text: str) -> bool:
    """Returns whether a text is a list of messages in JSON, as columns of CSV have it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(isinstance(one, dict) and one.get("role") in ROLES and "content" in one for one in found)


def without_nulls(value: Any) -> Any:
    """Returns a message without its keys of no value, which Parquet has where another row has one: templates ask for keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def check_parts(message: Mapping[str, Any], where: str) -> None:
    """Raises DataError unless the content of a message is a list of texts and places of images, and not empty."""
    if not message["content"]:
        raise DataError(f"{where}: the message of the {message['role']} is empty")
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise DataError(
                f"{where}: a part of a message must be {{type: text, text: ...}}, or {{type: image}} with the image in the"
                f" column that data.columns.images names: {str(part)[:80]}"
            )
