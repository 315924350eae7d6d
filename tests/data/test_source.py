import hashlib
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from helpers.rows import write_lines

from rlgen.data.source import Rows, cached_rows, load_rows
from rlgen.errors import DataError, SetupError
from rlgen.recipe.data import DataRecipe


def recipe(source, **settings):
    return DataRecipe(source=str(source), **settings)


def test_json_arrays_and_parquet(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(load_rows(recipe(tmp_path / "a.json"), 0).rows) == rows
    assert list(load_rows(recipe(tmp_path / "a.parquet"), 0).rows) == rows
    assert list(load_rows(recipe(tmp_path / "a.parquet", limit=1), 0).rows) == rows[:1]


def test_a_glob_reads_its_files_in_the_order_of_their_names(tmp_path):
    write_lines(tmp_path / "2.jsonl", [{"prompt": "second"}])
    write_lines(tmp_path / "1.jsonl", [{"prompt": "first"}])
    loaded = load_rows(recipe(tmp_path / "*.jsonl"), 0)
    assert [row["prompt"] for row in loaded.rows] == ["first", "second"] and loaded.columns == ("prompt",)
    assert loaded.kind == "file" and loaded.files == (str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl"))
    (tmp_path / "._1.jsonl").write_bytes(b"\x00\x05\x16\x07")  # macOS writes such files beside others
    assert [row["prompt"] for row in load_rows(recipe(tmp_path), 0).rows] == ["first", "second"]


def test_the_fingerprint_is_of_the_content(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])
    before = load_rows(recipe(path), 0).fingerprint
    assert load_rows(recipe(path), 1).fingerprint == before
    content = path.read_bytes()
    for blank in (b"\n", b"\r\n  \n", b"\n" * 3):
        path.write_bytes(content + blank)
        assert load_rows(recipe(path), 0).fingerprint == before, "a blank line at the end holds no row"
    assert before == hashlib.sha256(hashlib.sha256(content).digest()).hexdigest(), "earlier runs resume"
    write_lines(path, [{"prompt": "b"}])
    assert load_rows(recipe(path), 0).fingerprint != before


def test_a_task_takes_its_options_and_the_seed():
    loaded = load_rows(recipe("task:reverse", options={"size": 9, "alphabet": "ab"}, limit=4), 3)
    assert loaded.kind == "task" and len(loaded.rows) == 4 and loaded.columns == ("prompt", "answer")
    assert set(loaded.rows[0]["answer"]) <= {"a", "b"}
    other_seed = load_rows(recipe("task:reverse", options={"size": 9, "alphabet": "ab"}, limit=4), 4)
    assert other_seed.fingerprint != loaded.fingerprint


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "a.jsonl:3: the line is not JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n[1]\n', "a.jsonl:2: the line is not an object"),
        ("a.jsonl", b"\xff\xfe\x00", "UTF-8"),
        ("a.jsonl", b"", "holds no row"),
        ("a.json", b'[{"prompt": "a"}, 3]', "element 1 is not an object"),
        ("a.json", b'[{"prompt": "a"}', "not JSON"),
        ("a.csv", b"prompt,answer\na,b\nc\n", "a.csv:3: the record does not have 2 values"),
        ("a.csv", b'prompt,answer\n"a,b\n', "a.csv:2: not CSV"),
        ("a.csv", b"prompt,answer,,,answer\na,b,,,c\n", "a.csv:1: the column `answer` is there twice"),
        ("a.parquet", b"PAR1 not really", "cannot be read"),
        ("a.txt", b"text", ".txt"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, said, proof):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_rows(recipe(tmp_path / name), 0)
    assert said in str(caught.value) and str(tmp_path) in str(caught.value)
    proof(f"{name}: {said}")


def test_tables_without_rows(tmp_path, caplog):
    none, one = pyarrow.table({"prompt": pyarrow.array([], "string")}), pyarrow.table({"prompt": ["a"]})
    pyarrow.parquet.write_table(none, tmp_path / "1.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "none.arrow", none.schema) as file:
        file.write_table(none)
    for name in ("1.parquet", "none.arrow"):
        with pytest.raises(DataError, match=f"{name} holds no row"):
            load_rows(recipe(tmp_path / name), 0)
    assert not caplog.records, "`datasets` says nothing of its own"
    pyarrow.parquet.write_table(one, tmp_path / "2.parquet")
    assert list(load_rows(recipe(tmp_path / "*.parquet"), 0).rows) == one.to_pylist(), "a part may hold none"


def test_a_column_of_a_type_that_datasets_does_not_know(tmp_path):
    maps = pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "x": maps}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a\.parquet cannot be read: .*map<.*\. Write it without columns of this type, or as JSON"
    ):
        load_rows(recipe(tmp_path / "a.parquet"), 0)


@pytest.mark.fault(19)
def test_a_missing_file_and_a_missing_column(tmp_path, proof):
    with pytest.raises(DataError, match=r"nowhere\.jsonl.*there is no such file"):
        load_rows(recipe(tmp_path / "nowhere.jsonl"), 0)
    path = write_lines(tmp_path / "a.jsonl", [{"question": "a", "solution": "b"}])
    with pytest.raises(DataError) as caught:
        load_rows(recipe(path, columns={"prompt": "questions", "answer": "solution"}), 0)
    assert "data.columns.prompt" in str(caught.value)
    assert "did you mean `question`?" in str(caught.value) and "question, solution" in str(caught.value)
    with pytest.raises(DataError, match=r"data\.columns\.answer"):
        load_rows(recipe(path, columns={"prompt": "question", "answer": "answer"}), 0)
    proof(str(caught.value))


def test_a_hub_data_set_is_pinned_by_its_commit(monkeypatch):
    asked = []

    class Builder:
        hash = "e53f048856ff4f594e959d75785d2c2d37b678ee"

        def download_and_prepare(self):
            asked.append("prepared")

        def as_dataset(self, split):
            asked.append(split)
            import datasets

            return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])

    def load_dataset_builder(*args, **settings):
        asked.append((args, settings))
        return Builder()

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    loaded = load_rows(recipe("org/name", subset="main", split="test", revision="v2", limit=1), 0)
    assert asked == [(("org/name", "main"), {"revision": "v2"}), "prepared", "test"]
    assert loaded.kind == "hub" and loaded.fingerprint == Builder.hash and list(loaded.rows) == [{"prompt": "a"}]


def test_rows_of_the_cache_are_named_with_their_commit(monkeypatch):
    rows = Rows(rows=[{}], columns=(), kind="hub", source="org/name", fingerprint="c0ffee")
    assert cached_rows(rows, "v2") is None
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    said = "offline: data.source org/name is taken from the cache, commit c0ffee"
    assert cached_rows(rows, None) == cached_rows(rows, "c0ffee") == said
    assert cached_rows(rows, "v2") == f"{said}; it may differ from data.revision v2"
    assert cached_rows(replace(rows, kind="file"), None) is None


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ConnectionError("Couldn't reach 'org/name' on the Hub (OfflineModeIsEnabled)"), SetupError),
        (FileNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."), SetupError),
        (RuntimeError("Dataset scripts are no longer supported, but found name.py"), SetupError),
        (ValueError("Unknown split \"tset\". Should be one of ['test']."), DataError),
    ],
)
def test_what_the_hub_says_becomes_one_message(monkeypatch, raised, error, proof):
    def refuse(*args, **settings):
        raise raised

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(error) as caught:
        load_rows(recipe("org/name", revision="v2"), 0)
    assert type(caught.value) is error
    assert "org/name (revision v2)" in str(caught.value) and str(raised) in str(caught.value)
    proof(str(caught.value)[:100])


def test_a_folder_is_never_taken_for_a_hub_data_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(DataError, match=r"\./gsm8k"):
        load_rows(recipe("gsm8k"), 0)
