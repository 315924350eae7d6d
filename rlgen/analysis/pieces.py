"""The text of single tokens, from the tokenizer that a run's checkpoints or its model's folder hold. Nothing is downloaded."""

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from rlgen.analysis.run import Run
from rlgen.run.checkpoint_folder import CheckpointFolder

FILE = "tokenizer.json"
UNKNOWN = "\ufffd"  # what bytes decode to that are no whole character


def tokenizer_of(run: Run) -> Tokenizer | None:
    """Returns the tokenizer of a run: of its newest checkpoint, its model's folder, or the hub's cache; None: none is there."""
    checkpoints = CheckpointFolder(run.path / "checkpoints").steps()
    model = str((run.attempts[-1] if run.attempts else {}).get("model", run.recipe.model.path))
    places = [*(path / FILE for _, path in sorted(checkpoints.items(), reverse=True)), Path(model) / FILE]
    for place in places:
        if place.is_file():
            return Tokenizer.from_file(str(place))
    if model.count("/") == 1 and not model.startswith("/"):
        cached = try_to_load_from_cache(model, FILE, revision=run.recipe.model.revision)
        return Tokenizer.from_file(cached) if isinstance(cached, str) else None
    return None


def pieces_of(tokenizer: Tokenizer | None, ids: Iterable[int]) -> list[str]:
    """Returns the text of each id on its own; `#17` without a tokenizer."""
    return [f"#{one}" if tokenizer is None else piece(tokenizer, one) for one in ids]


def piece(tokenizer: Tokenizer, one: int) -> str:
    """Returns the text of one id: " the", or "⟦E2 96⟧" for bytes that are no whole character."""
    name, text = tokenizer.id_to_token(one), tokenizer.decode([one], skip_special_tokens=False)
    if name is None:
        return f"#{one}"
    if UNKNOWN in text:
        return f"⟦{' '.join(f'{BYTES[letter]:02X}' for letter in name)}⟧" if all(letter in BYTES for letter in name) else name
    # SentencePiece writes a space as ▁, and decoding drops it at the start of a text.
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def letters_of_bytes() -> dict[str, int]:
    """Returns the byte of each letter of byte-level tokenizers: printable bytes are themselves, the others follow from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = letters_of_bytes()
