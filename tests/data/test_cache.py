"""The cache of rows and prompts: a second start computes nothing and says the same; nothing stale or damaged is taken."""

import os
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow
import pytest
from helpers.before import before
from helpers.damage import flip
from helpers.rows import TEMPLATE, byte_tokenizer, prompts_of, write_lines

from rlgen.data import build_prompts, cache, load_rows, source, tokens
from rlgen.data.prompts import PromptStream, order
from rlgen.errors import DataError, SetupError
from rlgen.recipe.data import DataRecipe

COUNT = 20_000
SCHEMA = pyarrow.schema([("n", pyarrow.int32())])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, empty."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "rlgen"


@pytest.fixture
def all_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data sets are kept too, and their tables have several batches."""
    monkeypatch.setattr(tokens, "CACHED_ROWS", 1)
    monkeypatch.setattr(source, "CACHED_BYTES", 1)
    for module in (cache, source):
        monkeypatch.setattr(module, "BATCH", 3)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done for each row: lines that are parsed, texts that are templated or tokenised."""
    done: list[str] = []
    of_tokenizer = [(type(byte_tokenizer()), name) for name in ("_encode_plus", "apply_chat_template")]
    for place, name in ((source, "parse_row"), (tokens.PromptWriter, "render"), (tokens, "kind_of"), *of_tokenizer):
        before(place, name, lambda *_, name=name: done.append(name), monkeypatch.setattr)
    return done


def start(path: Path, tokenizer: Any = None, **settings: Any) -> PromptStream:
    return prompts_of(path, tokenizer or byte_tokenizer(), **settings)


def many_rows() -> list[dict[str, Any]]:
    """Texts and chats; some are empty, some twice, some too long, some without an answer or with an odd one."""
    rows: list[dict[str, Any]] = [{"prompt": f"p{n}", "answer": str(n), "n": n} for n in range(COUNT)]
    for n in range(0, COUNT, 7):
        rows[n]["prompt"] = [{"role": "user", "content": f"what is {n}?"}]
    for n in range(0, COUNT, 1001):
        rows[n]["prompt"] = " "
        rows[n + 1]["prompt"] = "p2"
        rows[n + 2]["prompt"] = "long " * 50
        rows[n + 3]["answer"] = None
        rows[n + 4]["answer"] = 7
        rows[n + 5]["extra"] = [1, {"a": None}, 2.5]
    return rows


def one_by_one(
    rows: list[dict[str, Any]], tokenizer: Any, longest: int
) -> tuple[list[tuple[str, tuple[int, ...], dict[str, Any]]], str]:
    """What a loop over rows makes of `many_rows`: text, ids and columns of each that is used, and the digest."""
    used, digest = [], sha256()
    for row in rows:
        prompt, columns = row["prompt"], {name: row.get(name) for name in ("prompt", "answer", "n", "extra")}
        if prompt == " " or not isinstance(row["answer"], str):
            continue
        chat = isinstance(prompt, list)
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) if chat else prompt
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if len(ids) <= longest:
            used.append((text, tuple(ids), columns))
            digest.update(array("q", (len(ids), *ids)).tobytes())
    return used, digest.hexdigest()[:16]


def test_a_second_start_tokenises_nothing_and_has_the_same_prompts(
    tmp_path: Path, folder: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many_rows()
    path = write_lines(tmp_path / "rows.jsonl", rows)
    settings: dict[str, Any] = {"columns": {"answer": "answer"}, "max_prompt_tokens": 200}
    first = start(path, **settings)
    assert {"parse_row", "render", "kind_of", "_encode_plus", "apply_chat_template"} == set(work)
    kept = sorted(folder.iterdir())
    assert [file.name.split("-")[0] for file in kept] == ["prompts", "rows"]

    work.clear()
    second = start(path, **settings)
    assert work == [] and sorted(folder.iterdir()) == kept

    monkeypatch.setattr(tokens, "CACHED_ROWS", COUNT + 1)
    monkeypatch.setattr(source, "CACHED_BYTES", 2**40)
    uncached = start(path, **settings)
    assert sorted(folder.iterdir()) == kept and "_encode_plus" in work

    used, digest = one_by_one(rows, byte_tokenizer(), 200)
    assert first.digest == second.digest == uncached.digest == digest
    assert first.counts == second.counts == uncached.counts
    assert sum(first.counts[name] for name in ("empty", "no_answer", "odd_answer", "over_long", "used")) == COUNT
    assert (first.counts["read"], first.counts["used"], first.counts["odd_answer"]) == (COUNT, len(used), 20)
    assert first.counts["duplicates"] == len(used) - len({ids for _, ids, _ in used}) == 19
    assert first.take(0, 3000) == second.take(0, 3000) == uncached.take(0, 3000)
    assert first.take(3 * len(used) - 9, 20) == uncached.take(3 * len(used) - 9, 20), "and in later epochs"
    taken = sorted(second.take(0, len(used)), key=lambda prompt: prompt.row)
    assert [(prompt.text, tuple(prompt.prompt_ids), prompt.columns) for prompt in taken] == used


def test_the_order_is_that_of_a_shuffled_list() -> None:
    expected = list(range(5000))
    Random("7/2").shuffle(expected)
    assert list(order(7, 2, 5000)) == expected
    assert list(order(0, 0, 8)) == [0, 2, 1, 4, 6, 7, 3, 5], "resumed runs depend on it"


ROWS = [{"prompt": f"p{n}", "answer": str(n), "other": "x"} for n in range(10)]
CHAT: dict[str, Any] = {"chat": True, "columns": {"answer": "answer"}}


def made(folder: Path, kind: str) -> int:
    return len(list(folder.glob(f"{kind}-*.arrow")))


@pytest.mark.parametrize(
    "change",
    [
        {"max_prompt_tokens": 60},
        {"system": "be brief"},
        {"chat": False},
        {"template_args": {"think": True}},
        {"overlong": "error"},
        {"limit": 9},
        {"columns": {"prompt": "other", "answer": "answer"}},
        {"columns": {}},
    ],
    ids=str,
)
def test_another_setting_is_not_taken_for_this_one(
    tmp_path: Path, folder: Path, all_cached: None, change: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    before = start(path, **CHAT)
    after = start(path, **{**CHAT, **change})
    assert (made(folder, "rows"), made(folder, "prompts")) == (1, 2)
    again = start(path, **CHAT)
    assert again.take(0, 10) == before.take(0, 10) and made(folder, "prompts") == 2
    assert (after.digest == before.digest) == (change in ({"max_prompt_tokens": 60}, {"overlong": "error"}, {"columns": {}}))


def test_order_and_seed_need_no_other_tokens(tmp_path: Path, folder: Path, all_cached: None) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    taken = [start(path, seed=seed, shuffle=shuffle, **CHAT).take(0, 10) for seed, shuffle in ((0, True), (1, True), (0, False))]
    assert len({tuple(prompt.row for prompt in prompts) for prompts in taken}) == 3 and made(folder, "prompts") == 1


def test_another_file_template_or_tokenizer_misses(
    tmp_path: Path, folder: Path, all_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    start(path, **CHAT)
    write_lines(path, [*ROWS[:-1], {**ROWS[-1], "prompt": "changed"}])
    assert start(path, shuffle=False, **CHAT).at(9).text == "<s>user: changed<s>assistant:"
    assert (made(folder, "rows"), made(folder, "prompts")) == (2, 2)

    loud = byte_tokenizer(TEMPLATE.replace("assistant", "ASSISTANT"))
    assert start(path, loud, shuffle=False, **CHAT).at(9).text == "<s>user: changed<s>ASSISTANT:"
    assert (made(folder, "rows"), made(folder, "prompts")) == (2, 3)

    larger = byte_tokenizer()
    larger.add_tokens(["changed"])
    assert len(larger) - 1 in start(path, larger, shuffle=False, **CHAT).at(9).prompt_ids
    assert made(folder, "prompts") == 4

    again = byte_tokenizer()
    again("shortened", truncation=True, max_length=3)  # what one call sets, the next one sets anew
    start(path, again, **CHAT)
    assert made(folder, "prompts") == 4

    monkeypatch.setattr(cache, "version", lambda name: "another")
    start(path, **CHAT)
    assert (made(folder, "rows"), made(folder, "prompts")) == (3, 5)


def test_the_same_bytes_in_another_format_are_other_rows(tmp_path: Path, folder: Path, all_cached: None) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert list(load_rows(DataRecipe(source=str(tmp_path / "rows.jsonl")), 0).rows) == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(DataError, match="no column `prompt`"):
        start(tmp_path / "rows.csv")


def test_a_template_with_the_date_is_of_one_day(
    tmp_path: Path, folder: Path, all_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dated = write_lines(tmp_path / "rows.jsonl", ROWS), byte_tokenizer("{{ strftime_now('%d') }}" + TEMPLATE)
    start(path, dated, **CHAT)
    start(path, dated, **CHAT)
    assert made(folder, "prompts") == 1

    class Tomorrow(date):
        @classmethod
        def today(cls) -> "Tomorrow":
            return cls(2100, 1, 1)

    monkeypatch.setattr(tokens, "date", Tomorrow)
    start(path, dated, **CHAT)
    assert made(folder, "prompts") == 2


def test_a_tokenizer_that_cannot_be_named_is_not_kept(tmp_path: Path, folder: Path, all_cached: None) -> None:
    class Slow(type(byte_tokenizer())):  # type: ignore[misc]
        is_fast = False

    tokenizer = byte_tokenizer()
    tokenizer.__class__ = Slow
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    assert start(path, tokenizer, **CHAT).digest == start(path, **CHAT).digest
    assert made(folder, "prompts") == 1


@pytest.mark.parametrize("kind", ["rows", "prompts"])
@pytest.mark.parametrize(
    "damage",
    [
        *(partial(flip, share=share) for share in (0, 0.3, 0.5, 0.9, 1)),
        *(lambda path: os.truncate(path, 100), lambda path: path.write_bytes(b"")),
    ],
    ids=["first byte", "a third", "half", "near the end", "last byte", "cut off", "empty"],
)
def test_a_damaged_file_is_made_again(
    tmp_path: Path, folder: Path, all_cached: None, work: list[str], damage: Callable[[Path], None], kind: str
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    before = start(path, **CHAT).take(0, 10)
    (file,) = folder.glob(f"{kind}-*.arrow")
    sound = file.read_bytes()
    damage(file)
    work.clear()
    assert start(path, **CHAT).take(0, 10) == before
    assert file.read_bytes() == sound and made(folder, kind) == 1
    assert set(work) == ({"parse_row"} if kind == "rows" else {"kind_of", "render", "_encode_plus", "apply_chat_template"})


def test_what_is_refused_is_refused_again(tmp_path: Path, all_cached: None) -> None:
    odd = write_lines(tmp_path / "odd.jsonl", [{**row, "answer": 7 if n < 2 else "7"} for n, row in enumerate(ROWS)])
    for _ in range(2):
        with pytest.raises(DataError, match="is a text in most rows, but not in 2 of 10"):
            start(odd, **CHAT)
        with pytest.raises(DataError, match=r"row 0: \d+ tokens, but data.max_prompt_tokens is 5"):
            start(odd, max_prompt_tokens=5, overlong="error", **CHAT | {"columns": {}})
        with pytest.raises(DataError, match=r"no row is left: .*10 over_long"):
            start(odd, max_prompt_tokens=5, **CHAT | {"columns": {}})
        with pytest.raises(DataError, match=r"data\.template_args: no prompt is a chat"):
            start(odd, template_args={"think": True})


def test_many_runs_make_the_same_table_at_the_same_time(folder: Path) -> None:
    def make(write: cache.Write) -> dict[str, Any]:
        for n in range(20):
            write(pyarrow.record_batch([pyarrow.array([n], pyarrow.int32())], schema=SCHEMA))
            time.sleep(0.005)
        return {"last": 19}

    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda _: cache.cached("rows", "same", SCHEMA, make), range(8)))
    assert {tuple(one.table.column("n").to_pylist()) for one in tables} == {tuple(range(20))}
    assert all(one.facts == {"last": 19} for one in tables)
    assert len(list(folder.iterdir())) == 1 and made(folder, "rows") == 1


def test_a_table_that_is_not_finished_is_not_kept(folder: Path, tmp_path: Path) -> None:
    def fails(write: cache.Write) -> dict[str, Any]:
        write(pyarrow.record_batch([pyarrow.array([1], pyarrow.int32())], schema=SCHEMA))
        raise DataError("row 1 is none")

    with pytest.raises(DataError, match="row 1 is none"):
        cache.cached("rows", "failed", SCHEMA, fails)
    assert list(folder.iterdir()) == []
    (tmp_path / "cache" / "rlgen").rmdir()
    (tmp_path / "cache" / "rlgen").write_text("in the way")
    with pytest.raises(SetupError, match=r"cannot be written: .*set HF_DATASETS_CACHE"):
        cache.cached("rows", "nowhere", SCHEMA, lambda write: {})


def test_files_opened_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        cache.cached("rows", name, SCHEMA, lambda write: {})
    (size,) = {file.stat().st_size for file in folder.iterdir()}
    (folder / "rows-killed-0.part").write_bytes(b"half")
    (folder / "rows-going-1.part").write_bytes(b"half")
    for days, name in enumerate(["d", "c", "a", "killed"], 2):
        (file,) = folder.glob(f"rows-{name}-*")
        os.utime(file, (time.time(), time.time() - days * cache.DAY))
    cache.cached("rows", "a", SCHEMA, lambda write: pytest.fail("a is there"))  # opened: the newest now
    monkeypatch.setattr(cache, "MAX_BYTES", 5 * size - 1)
    cache.cached("rows", "e", SCHEMA, lambda write: {})
    left = sorted(file.name.split("-")[1] for file in folder.iterdir())
    assert left == ["a", "b", "d", "e", "going"], "c was opened three days ago, d two"
    monkeypatch.setattr(cache, "MAX_BYTES", 0)
    cache.cached("rows", "f", SCHEMA, lambda write: {})
    assert sorted(file.name.split("-")[1] for file in folder.iterdir()) == ["a", "b", "e", "f", "going"], "all of the last day"


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, folder: Path, all_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    read = source.TEXT_READERS[".jsonl"]

    def edited(file: Path) -> Iterator[Any]:
        with path.open("a") as end:
            end.write('{"prompt": "late"}\n')
        yield from read(file)

    monkeypatch.setitem(source.TEXT_READERS, ".jsonl", edited)
    with pytest.raises(DataError, match="changed while it was read"):
        start(path)
    assert list(folder.iterdir()) == []


def test_half_a_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\\ud83d"}\n')
    with pytest.raises(DataError, match=r"row 1: the prompt holds '\\ud83d', half of a character"):
        start(path)


def test_a_task_is_kept_by_its_rows(folder: Path, all_cached: None) -> None:
    taken = []
    for seed in (1, 2, 1):
        data = DataRecipe(source="task:sort", options={"size": 9})
        taken.append(build_prompts(data, load_rows(data, seed), byte_tokenizer(), seed).take(0, 9))
    assert taken[0] == taken[2] != taken[1] and (made(folder, "rows"), made(folder, "prompts")) == (0, 2)
