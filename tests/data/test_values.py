"""Rewards get each value as the file has it: Arrow changes none, wherever the rows are kept."""

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.rows import prompts_of, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from rlgen.data import source, tokens
from rlgen.errors import DataError

ODD: list[Any] = [
    *(None, True, 1, 1.0, -0.0, "1", "", 2**63, 2**64, -(10**40), 0.1, 1e300, float("inf"), float("-inf")),
    *(
        [],
        {},
        [1, "a", None, [2.5, {"x": []}]],
        {"": 1, "prompt": {"deep": [None]}},
        "\x00\x7f é 𝄞 \u2028",
        "a\ud800",
        "07",
        "2024-01-01",
        "NA",
    ),
]


@pytest.fixture(params=["in memory", "cached"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if request.param == "cached":
        monkeypatch.setattr(tokens, "CACHED_ROWS", 1)
        monkeypatch.setattr(source, "CACHED_BYTES", 1)


def columns(path: Path, **recipe: Any) -> list[Any]:
    """What rewards get of each row, in the order of the file."""
    prompts = prompts_of(path, shuffle=False, **recipe)
    return [prompts.at(position).columns for position in range(len(prompts))]


def exactly(value: Any) -> str:
    """Tells 1, 1.0 and True apart, and 0.0 and -0.0; NaN is like NaN."""
    return repr(value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_values_of_any_type_in_one_column(tmp_path: Path, place: None, suffix: str) -> None:
    rows = [{"prompt": f"p{n}", "x": value} for n, value in enumerate([*ODD, float("nan")])]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_lines(path, rows)
    for _ in range(2):
        assert exactly(columns(path)) == exactly(rows)


def test_missing_keys_are_none_and_columns_have_one_order(tmp_path: Path, place: None) -> None:
    rows = [{"prompt": "a"}, {"z": 1, "prompt": "b"}, {"y": None, "prompt": "c"}, {"prompt": "d", "prompt ": 2}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    empty = {"prompt": None, "z": None, "y": None, "prompt ": None}
    for _ in range(2):
        assert [list(row.items()) for row in columns(path)] == [list({**empty, **row}.items()) for row in rows]
        assert list(columns(path, limit=1)[0]) == list(empty), "columns are those of all rows, whatever the limit"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=4), min_size=1, max_size=6))
def test_every_json_value_comes_back(tmp_path_factory: pytest.TempPathFactory, some: list[dict[str, Any]]) -> None:
    rows = [{"prompt": "p", **{name: value for name, value in row.items() if name != "prompt"}} for row in some]
    path = write_lines(tmp_path_factory.mktemp("values") / "rows.jsonl", rows)
    names = dict.fromkeys(name for row in rows for name in row)
    assert exactly(columns(path)) == exactly([{name: row.get(name) for name in names} for row in rows])


def test_csv_is_text(tmp_path: Path, place: None) -> None:
    path = tmp_path / "rows.csv"
    long = "x" * 200_000
    rows = f'a,007\nb,\nc,"1\n2"\r\nd,"\u2028"\ne,NA\nf,"1\r\n2\r3"\r\ng,{long}\n'
    path.write_bytes(f"\ufeffprompt,x\n{rows}".encode())
    expected = [("a", "007"), ("b", ""), ("c", "1\n2"), ("d", "\u2028"), ("e", "NA"), ("f", "1\r\n2\r3"), ("g", long)]
    for _ in range(2):
        assert columns(path) == [{"prompt": prompt, "x": x} for prompt, x in expected]


def test_parquet_values_are_those_that_datasets_gives(tmp_path: Path, place: None) -> None:
    now = datetime(2024, 1, 2, 3, 4, 5, 678901)
    values: dict[str, pyarrow.Array] = {
        "text": pyarrow.array(["a", None, ""]),
        "whole": pyarrow.array([2**62, None, -1]),
        "small": pyarrow.array([1, None, 3], pyarrow.uint8()),
        "real": pyarrow.array([0.1, None, float("nan")]),
        "half": pyarrow.array([0.1, None, 1.0], pyarrow.float32()),
        "flag": pyarrow.array([True, None, False]),
        "day": pyarrow.array([date(2024, 1, 2), None, date(1, 1, 1)]),
        "time": pyarrow.array([now, None, now], pyarrow.timestamp("us")),
        "zone": pyarrow.array([now.replace(tzinfo=UTC), None, None], pyarrow.timestamp("us", "UTC")),
        "span": pyarrow.array([timedelta(seconds=1.5), None, None], pyarrow.duration("us")),
        "price": pyarrow.array([Decimal("1.10"), None, Decimal("2.00")]),
        "bytes": pyarrow.array([b"\x00", None, b""]),
        "list": pyarrow.array([[1, None], None, []]),
        "record": pyarrow.array([{"a": 1, "b": [{"c": "x"}]}, None, {"a": None, "b": []}]),
        "nothing": pyarrow.nulls(3),
    }
    table = pyarrow.table({"prompt": ["p", "q", "r"], **values})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    for _ in range(2):
        made = columns(path)
        loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "other"))
        assert exactly(made) == exactly([loaded[n] for n in range(3)]) == exactly(table.to_pylist())


def test_chats_of_parquet(tmp_path: Path, place: None) -> None:
    chats = [[{"role": "user", "content": f"hi {n}"}] for n in range(5)]
    datasets.Dataset.from_dict({"prompt": chats, "answer": list("abcde")}).to_parquet(str(tmp_path / "rows.parquet"))
    for _ in range(2):
        made = columns(tmp_path / "rows.parquet", columns={"answer": "answer"})
        assert made == [{"prompt": chat, "answer": answer} for chat, answer in zip(chats, "abcde", strict=True)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_what_python_cannot_read_names_the_file(tmp_path: Path, suffix: str) -> None:
    for text in ('{"prompt": ' + "[" * 100_000, '{"prompt": ' + "7" * 5000 + "}"):
        (tmp_path / f"rows{suffix}").write_text("[" + text if suffix == ".json" else text)
        with pytest.raises(DataError, match=f"rows{suffix}.*not JSON"):
            columns(tmp_path / f"rows{suffix}")
