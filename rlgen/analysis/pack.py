"""Packs rollouts for the report: a table of all rows, and chunks of texts and tokens that a browser unpacks when it shows them.

Log-probs are 16-bit floats whose last two bits are rounded away: exact to 0.25 %. What is stored is the engine's log-prob and the
difference to the trainer's, so that a difference of 1e-6 is as exact. Ids are places in a list of the tokens that occur, most
frequent first. Bytes of equal significance stand together, so that gzip finds repetitions.
"""

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rlgen.analysis.rows import readable, text_of_message
from rlgen.analysis.run import Run
from rlgen.recipe.trainers import CorrectionRecipe
from rlgen.rollout.parquet import FIXED, OF_TURNS, has_turns, parts_of, ragged
from rlgen.rollout.read import metadata_of, read_rollouts, rollout_steps, rollouts_of
from rlgen.rollout.samples import Ragged
from rlgen.run.checkpoint_folder import CheckpointFolder

MOST_TOKENS = 2_100_000  # completion tokens in one report, which keep it below 20 MB
CHUNK_ROWS, CHUNK_TOKENS = 1000, 200_000  # a chunk ends after the step that exceeds one of them
SCALE = 256  # of log-probs: small differences would lose digits as 16-bit floats
DIGITS = 6  # significant digits of the numbers of a row
TOKENIZER = "tokenizer.json"
UNKNOWN = "\ufffd"  # what bytes decode to that are no whole character


def choose(run: Path, most_rows: int) -> tuple[list[int], int, int]:
    """Returns the newest step and every n-th before it, with the smallest n that keeps to `most_rows` and `MOST_TOKENS`; and how
    many steps and rollouts the run has.
    """
    steps = rollout_steps(run / "rollouts")
    sizes = [size_of(rollouts_of(run, step)) for step in steps]
    for every in range(1, len(steps) + 1):
        chosen = range(len(steps) - 1, -1, -every)
        rows, tokens = (sum(sizes[place][of] for place in chosen) for of in (0, 1))
        if rows <= most_rows and tokens <= MOST_TOKENS:
            break
    return [steps[place] for place in chosen][::-1] if steps else [], len(steps), sum(rows for rows, _ in sizes)


def size_of(path: Path) -> tuple[int, int]:
    """Returns the rows and the completion tokens of a step, by its files' metadata. Raises CheckpointError if one is damaged."""
    rows, tokens = 0, 0
    for part in parts_of(path):
        found = metadata_of(part)
        column = next(place for place in range(found.num_columns) if found.schema.column(place).path.startswith("completion_ids"))
        rows += found.num_rows
        tokens += sum(found.row_group(place).column(column).num_values for place in range(found.num_row_groups))
    return rows, tokens


def pack_rollouts(run: Run, most_rows: int) -> tuple[dict[str, Any], dict[str, str], list[int]]:
    """Packs the rollouts of a run. Returns what the browser needs to read the rest; parts by name, "rows", "texts-0", "tokens-0",
    ..., each base64 of gzip; and the token ids that occur, in the order of "pieces".
    """
    steps, total_steps, total_rows = choose(run.path, most_rows)
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    chunks = [Chunk.of(run, table) for table in chunked(run.path, steps, most_rows)]
    for chunk in chunks:
        for name, values in chunk.rows.items():
            rows[name] += values
    ids, counts = np.unique(np.concatenate([chunk.ids for chunk in chunks] or [np.zeros(0, np.int32)]), return_counts=True)
    by_frequency = np.argsort(-counts, kind="stable")
    rank = np.argsort(by_frequency).astype(np.uint32)
    parts = {"rows": packed_json(rows)}
    for place, chunk in enumerate(chunks):
        parts[f"texts-{place}"] = packed_json(chunk.texts)
        parts[f"tokens-{place}"] = packed(planes(rank[np.searchsorted(ids, chunk.ids)], chunk.sampler, chunk.delta, chunk.flags))
    correction = run.recipe.trainer.correction
    facts = {
        "count": sum(len(chunk.rows["step"]) for chunk in chunks),
        "total": total_rows,
        "steps": len(steps),
        "totalSteps": total_steps,
        "chunks": [len(chunk.rows["step"]) for chunk in chunks],
        "low": correction.min,
        "high": correction.max,
        "rewards": sorted(name.removeprefix("reward/") for name in rows if name.startswith("reward/")),
    }
    return facts, parts, ids[by_frequency].tolist()


def chunked(run: Path, steps: Sequence[int], most_rows: int) -> Iterator[pa.Table]:
    """Yields the rollouts of some steps as tables of about `CHUNK_ROWS`, whole steps each. A step of more than `most_rows` or
    `MOST_TOKENS`, which then is the only one, is cut.
    """
    waiting: list[pa.Table] = []
    tokens = 0
    for step in steps:
        table = read_rollouts(run, step)
        ends = np.cumsum(np.asarray(pc.list_value_length(table["completion_ids"])))
        table = table.slice(0, min(most_rows, max(1, int(ends.searchsorted(MOST_TOKENS, side="right")))))
        waiting.append(table)
        tokens += int(ends[-1]) if len(ends) else 0
        if sum(map(len, waiting)) >= CHUNK_ROWS or tokens >= CHUNK_TOKENS:
            yield pa.concat_tables(waiting, promote_options="permissive")
            waiting, tokens = [], 0
    if waiting:
        yield pa.concat_tables(waiting, promote_options="permissive")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Some rollouts, before they are packed."""

    rows: Mapping[str, list[Any]]
    texts: Mapping[str, Any]
    ids: NDArray[np.int32]  # [N]
    sampler: NDArray[np.float16]  # [N]
    delta: NDArray[np.float16]  # [N] trainer - engine; NaN where there is nothing to compare
    flags: NDArray[np.uint8]  # [N] mask + 2 * code of the weight

    @classmethod
    def of(cls, run: Run, table: pa.Table) -> "Chunk":
        ids, sampler, policy, mask = (
            ragged(table, name) for name in ("completion_ids", "sampler_logp", "policy_logp", "loss_mask")
        )
        lengths = ids.lengths
        delta = np.full(len(ids.values), np.nan, dtype=np.float32)
        compared = np.repeat(policy.lengths > 0, lengths)
        delta[compared] = policy.values - sampler.values[compared]
        codes, weights = weights_of(run.recipe.trainer.correction, policy, sampler, mask)
        gaps = np.array([np.nan if np.isnan(one).all() else np.nanmax(np.abs(one)) for one in Ragged(delta, ids.offsets)])
        single = table["rewards"].combine_chunks() if "rewards" in table.column_names else None
        labels = [] if single is None else [field.name for field in single.type]
        prompts, place = prompts_of(table)
        names = ("step", "group_id", "sample_index", "reward", "advantage")
        rows = {name: [short(value) for value in table[name].to_pylist()] for name in names}
        for label, values in zip(labels, [] if single is None else single.flatten(), strict=True):
            rows[f"reward/{label}"] = [short(value) for value in values.to_pylist()]
        return cls(
            rows={
                **rows,
                "length": lengths.tolist(),
                "truncated": [int(reason == "length") for reason in table["finish_reason"].to_pylist()],
                "trained": [int(value) for value in table["trained"].to_pylist()],
                "gap": [short(value) for value in gaps.tolist()],
                "weight": [short(value) for value in weights.tolist()],
                "prompt": place,
            },
            texts={
                "prompts": prompts,
                "completions": table["completion"].to_pylist(),
                "messages": conversations_of(table),
                "errors": {row: dict(errors) for row, errors in enumerate(table["reward_errors"].to_pylist()) if errors},
            },
            ids=ids.values,
            sampler=halves(sampler.values),
            delta=halves(delta),
            flags=mask.values.astype(np.uint8) + 2 * codes,
        )


class Code(IntEnum):
    """How the weight of a token follows from its ratio."""

    NONE = 0  # it has no weight: outside the mask, or not trained
    RATIO = 1
    ZERO = 2
    LOW = 3  # the lower cap
    HIGH = 4  # the upper cap
    ROW = 5  # the weight of its whole completion


def weights_of(
    recipe: CorrectionRecipe, policy_logp: Ragged, sampler_logp: Ragged, loss_mask: Ragged
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Returns the codes [N] of the weights that the loss used, and [B] the weights of whole rows, for `Code.ROW`; NaN: none. The
    rows [B] of `policy_logp` are empty if they were not trained.
    """
    import torch

    from rlgen.algorithms.base import correction_of
    from rlgen.losses.correction import importance_weight, log_ratio, ratio_of

    correction = correction_of(recipe)
    codes = np.full(len(sampler_logp.values), Code.NONE, dtype=np.uint8)
    rows = np.full(len(sampler_logp), np.nan)
    trained = policy_logp.lengths > 0
    for row in trained.nonzero()[0].tolist():
        mask = torch.from_numpy(np.array(loss_mask[row]))[None]
        policy, sampler = (torch.from_numpy(np.array(of[row]))[None] for of in (policy_logp, sampler_logp))
        weight = importance_weight(policy, sampler, mask, correction)
        ratio = ratio_of(log_ratio(policy, sampler, mask), correction)
        place = slice(int(sampler_logp.offsets[row]), int(sampler_logp.offsets[row + 1]))
        if correction.of_rows or correction.mode == "none":
            rows[row] = float(weight[0, 0])
            code = torch.full_like(mask, Code.ROW, dtype=torch.uint8)
        else:
            code = torch.where(weight == ratio, Code.RATIO, torch.where(weight < ratio, Code.HIGH, Code.LOW))
            code = torch.where(weight == 0, Code.ZERO, code)
        codes[place] = torch.where(mask, code, Code.NONE)[0].numpy()
    return codes, rows


def prompts_of(table: pa.Table) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns each prompt once, with the data set's columns as texts, and the place of each row's prompt."""
    own = FIXED | OF_TURNS if has_turns(table.column_names) else FIXED
    names = ["prompt", *(name for name in table.column_names if name not in own)]
    keys = list(zip(table["step"].to_pylist(), table["group_id"].to_pylist(), strict=True))
    first: dict[tuple[int, int], int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    places = {key: place for place, key in enumerate(first)}
    prompts = table.select(names).take(pa.array(list(first.values()), pa.int64())).to_pylist()
    texts = [{name: readable(value) for name, value in one.items()} for one in prompts]
    return [{"text": one.pop("prompt"), "data": one} for one in texts], [places[key] for key in keys]


def conversations_of(table: pa.Table) -> list[list[dict[str, Any]]] | None:
    """Returns all messages of each row as texts; None for a run without conversations."""
    if not has_turns(table.column_names):
        return None
    rows = map(json.loads, table["messages"].to_pylist())
    return [[{"role": one["role"], "name": one.get("name"), "text": text_of_message(one)} for one in row] for row in rows]


def short(value: float | None) -> float | int | None:
    """Returns a number with `DIGITS` significant digits; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def halves(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Returns 16-bit floats of `SCALE` times the values, with eight bits of mantissa: what is rounded away would not compress.
    From 2e-7 to 255 nats they are exact to 0.25 %; beyond 255 they are 255.
    """
    within = np.where(np.isfinite(values), np.clip(values, -255, 255), values).astype(np.float32)
    bits = (within * np.float32(SCALE)).astype(np.float16).view(np.uint16)
    return ((bits + 2) & 0xFFFC).astype(np.uint16).view(np.float16)


def planes(*columns: NDArray[Any]) -> bytes:
    """Returns the first bytes of all values of a column, then the second bytes, ...: equal ones stand together."""
    return b"".join(np.ascontiguousarray(column.view(np.uint8).reshape(-1, column.itemsize).T).tobytes() for column in columns)


def packed_json(value: Any) -> str:
    """Returns a value as packed JSON. Lone surrogates and line separators are JSON escapes, so that any text survives."""
    return packed(json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode())


def packed(content: bytes) -> str:
    """Returns the bytes as base64 of gzip, the same each time."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def tokenizer_of(run: Run) -> Tokenizer | None:
    """Returns the tokenizer of a run's newest checkpoint, its model's folder or the hub's cache; None: none is here."""
    checkpoints = CheckpointFolder(run.path / "checkpoints").steps()
    model = str((run.attempts[-1] if run.attempts else {}).get("model", run.recipe.model.path))
    places = [*(path / TOKENIZER for _, path in sorted(checkpoints.items(), reverse=True)), Path(model) / TOKENIZER]
    for place in places:
        if place.is_file():
            return Tokenizer.from_file(str(place))
    if model.count("/") == 1 and not model.startswith("/"):
        cached = try_to_load_from_cache(model, TOKENIZER, revision=run.recipe.model.revision)
        return Tokenizer.from_file(cached) if isinstance(cached, str) else None
    return None


def piece(tokenizer: Tokenizer | None, one: int) -> str:
    """Returns the text of one id: " the"; "⟦E2 96⟧" for bytes that are no whole character; "#17" if it is not known."""
    name = None if tokenizer is None else tokenizer.id_to_token(one)
    if tokenizer is None or name is None:
        return f"#{one}"
    text = tokenizer.decode([one], skip_special_tokens=False)
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
