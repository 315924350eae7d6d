"""The README and the pages of `rlgen docs`: tables as the code has them, every page reachable, nothing too long."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import docs
import pytest
from conftest import ROOT
from pydantic import BaseModel
from test_house import TABLE
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.docs import PAGES, page_names, page_text, summary
from rlgen.recipe.data import TASKS
from rlgen.recipe.models import Recipe

README = (ROOT / "README.md").read_text()


def test_tables_are_as_the_code_has_them_and_stand_somewhere() -> None:
    assert [path.name for path in docs.FILES if docs.written(path.read_text()) != path.read_text()] == [], "run `make docs`"
    marked = {name for path in docs.FILES for _, name, _ in docs.BLOCK.findall(path.read_text())}
    assert {name for name in marked if " " not in name} == set(docs.TABLES)


def test_a_stale_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: exit-codes -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(docs, "FILES", [page])
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    with pytest.raises(SystemExit, match="1"):
        docs.main()
    assert "\nold\n" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["docs.py"])
    with pytest.raises(SystemExit, match="0"):
        docs.main()
    text = page.read_text()
    assert "\nold\n" not in text and "| 75 | `Stopped` |" in text
    assert text.startswith("before\n") and text.endswith("-->\nafter\n")


def test_the_readme_is_short_and_names_every_page_every_room_and_no_file_that_is_not_there() -> None:
    assert len(README.split()) <= 1200 and "\nmake test " in README
    linked = set(re.findall(r"\]\((\S+?)\)", README))
    assert {f"rlgen/docs/{name}.md" for name in page_names()} <= linked
    assert {path for path in linked if not (ROOT / path).exists()} == set()
    table = README[README.index("## Where things are") :]
    rooms = {path.relative_to(ROOT / "rlgen").parts[0] for path in (ROOT / "rlgen").rglob("*.py")}
    rooms = {room for room in rooms if not room.startswith("__")}
    assert {room for room in rooms if f"`{room}`" not in table and f"`{room}/`" not in table} == set()
    assert {room.removesuffix(".py") for room in rooms} <= set(TABLE)


def test_pictures_are_there_and_small() -> None:
    shown = {path for name in page_names() for path in re.findall(r"!\[[^\]]+\]\((\S+?)\)", page_text(name))}
    assert shown == {f"pictures/{path.name}" for path in (PAGES / "pictures").glob("*")}
    assert all((PAGES / path).stat().st_size <= 200_000 for path in shown)


@pytest.mark.parametrize("name", page_names())
def test_a_page_begins_with_its_title_and_one_line(name: str) -> None:
    lines = page_text(name).splitlines()
    assert lines[0].startswith("# ") and lines[1] == lines[3] == ""
    assert lines[2].endswith(".") and len(lines[2]) <= 120
    assert "<!--" not in page_text(name)
    tables = [row for row in re.sub(r"(?s)```.*?```", "", page_text(name)).splitlines() if row.startswith("| ")]
    assert all(row.endswith("|") for row in tables), "a row of a table is one line"


def test_pages_name_only_pages_and_files_that_are_there() -> None:
    named = set()
    for name in page_names():
        text = page_text(name)
        named |= {(name, path) for path in re.findall(r"`((?:rlgen|tests|scripts)/[\w/.-]+)`", text)}
        named |= {(name, f"rlgen/{path}") for path in re.findall(rf"`((?:{'|'.join(TABLE)})/[\w/]+\.py)`", text)}
    assert len(named) > 20 and {one for one in named if not (ROOT / one[1]).exists()} == set()


def test_the_list_of_pages_and_a_page_where_nobody_sees_a_layout() -> None:
    lines = CliRunner().invoke(app, ["docs"]).output.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in PAGES.glob("*.md"))
    assert lines[0].endswith(summary(page_text(page_names()[0])))
    assert CliRunner().invoke(app, ["docs", "metrics"]).output == page_text("metrics")


def test_a_page_has_its_layout_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rlgen.cli.docs import docs_command

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    docs_command("exit-codes")
    shown = capsys.readouterr().out
    assert "# Exit codes" not in shown and "Exit codes" in shown and "| --- |" not in shown and "DivergedError" in shown


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for below in docs.models_of(field.annotation):
            yield from models(below)


def test_every_key_of_a_recipe_has_a_sentence_and_is_on_its_page() -> None:
    page = page_text("recipe")
    for model in {*models(Recipe), *TASKS.values()} - {Recipe}:
        for key, field in model.model_fields.items():
            assert key == "kind" or (field.description or "").strip().endswith("."), (model, key)
            assert key == "kind" or f"| `{key}` |" in page, (model, key)


def test_every_command_is_on_its_page() -> None:
    page = page_text("commands")
    result = CliRunner().invoke(app, ["--help"])
    listed = re.findall(r"^  ([a-z]+) ", result.output[result.output.index("Commands:") :], re.MULTILINE)
    assert len(listed) > 10 and all(re.search(rf"\n### rlgen {name}[ \n]", page) for name in listed)


@pytest.mark.parametrize("name", [name for name, _ in docs.commands()])
def test_the_help_of_every_command_fits_80_columns(name: str) -> None:
    """Its example is tested in test_pages.py."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, shown.splitlines())) <= 80
