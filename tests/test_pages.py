"""Every command, recipe and function on the pages of `rlgen docs` and in the README: it exists, and it was run."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs
import pytest
import typer
import yaml
from conftest import RECIPE, ROOT
from helpers.runs import bare_run, make_run
from recipe import mistakes
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.recipe import load_recipe
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

PAGES = {path.stem: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "rlgen" / "docs").glob("*.md"))]}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages whose blocks are run by a test of their own.
OWN_TESTS = {
    "environments": "tests/tools/test_tools_page.py",
    "first-run": "tests/test_first_run.py",
    "judges": "tests/rewards/test_page.py",
    "python": "tests/test_python.py",
    "rewards": "tests/rewards/test_page.py",
    "rollouts": "tests/rollout/test_custom.py",
    "tools": "tests/tools/test_tools_page.py",
    "troubleshooting": "tests/test_pages.py",
}
# Commands that no test types as they stand, with the reason.
NOT_RUN = {
    "rlgen train recipe.yaml --progress plain": "tests/run/test_console.py looks at its lines",
    "torchrun --nproc-per-node 2 -m rlgen replay mine --step 17": "two processes; tests/setup/test_replay.py runs them",
    "rlgen eval Qwen/Qwen3-0.6B recipe.yaml": "the hub; the other lines of the block are run",
    "torchrun --nproc-per-node 4 -m rlgen train recipe.yaml": "four processes; tests/run/test_processes.py runs two",
    "accelerate launch --num_processes 4 -m rlgen train recipe.yaml": "four processes; tests/run/test_processes.py runs two",
    "make setup": "is what installs this package",
    "make demo": "tests/test_recipes.py trains the three recipes",
    "make test": "is what runs this test",
    ".venv/bin/pytest": "a part of `make test`",
}
# Python that is no example.
EXCERPTS = {"walk": "the loop, shortened: tests/trainers run it", "one-step": "copied from the source"}
# Options of other programs.
FOREIGN = {"--max-restarts": "torchrun", "--slow": "pytest", "--real": "scripts/false_alarms.py"}

GROUPS = sorted({name.split()[0] for name, _ in docs.commands() if " " in name})
EXAMPLES = {
    "train.jsonl": '{"question": "1+1=", "answer": "2"}\n',
    "heldout.jsonl": '{"question": "2+2=", "answer": "4"}\n',
    "rewards.py": mistakes.REWARDS + "\n\ndef brevity(completion):\n    return -len(completion) / 1000\n",
}


def blocks() -> Iterator[tuple[str, str, str]]:
    """(page, language, text) of every block."""
    for page, text in PAGES.items():
        for kind, block in FENCED.findall(text):
            yield page, kind, block


def command_of(line: str) -> str | None:
    """The command of a line, without its prompt and its comment; None: the line is no command."""
    found = re.match(r"(?:\$ )?((?:rlgen(?! \d)|torchrun|accelerate|make|\.venv/bin/\w+) .*?)\s*(?:\s# .*)?$", line)
    return found[1] if found else None


def shown(text: str) -> list[str]:
    """The command of a block's first line, and the lines after it."""
    first, *lines = text.splitlines()
    command = command_of(first)
    assert command is not None
    return [command, *lines]


def commands(*pages: str) -> list[tuple[str, str]]:
    """(page, command) of all blocks of these pages; of all pages if none is named."""
    lines = [(page, command_of(line)) for page, _, text in blocks() for line in text.splitlines()]
    return [(page, command) for page, command in lines if command is not None and (not pages or page in pages)]


def mentioned() -> list[tuple[str, str]]:
    """(page, command) of all commands within sentences."""
    return [(page, command) for page, text in PAGES.items() for command in re.findall(r"`(rlgen [a-z][^`]*)`", text)]


def parse(command: str) -> None:
    """Parses a command line without running it. Raises what typer raises for an option that is not there."""
    words = shlex.split(command.partition(" | ")[0])[1:]
    if words[0] == "docs" or not words[0].islower():
        words = words[:1]
    found: Any = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    rest = words[1:]
    if rest and hasattr(found, "commands"):
        found, rest = found.commands[rest[0]], rest[1:]
    if not hasattr(found, "commands"):
        found.make_parser(found.context_class(found)).parse_args(rest)


@pytest.mark.parametrize(("page", "command"), sorted({*commands(), *mentioned()}))
def test_a_command_and_its_options_are_there(page: str, command: str) -> None:
    if command.startswith("rlgen "):
        parse(command)


def test_a_command_that_is_not_there_is_found() -> None:
    parse("rlgen status")  # what is required may be missing in a sentence
    for wrong, said in (("trian recipe.yaml", "trian"), ("train recipe.yaml --rezume", "--rezume"), ("recipes cpy smoke", "cpy")):
        with pytest.raises(Exception, match=said):
            parse(f"rlgen {wrong}")


@pytest.mark.parametrize("name", ["", *GROUPS, *(name for name, _ in docs.commands())])
def test_the_example_of_a_command_is_there_and_can_be_typed(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    examples = [line.strip().removeprefix("Example: ") for line in shown.splitlines() if line.strip().startswith("Example: ")]
    assert examples
    typed = [command for command in re.split(r" && | \| | > ", examples[-1]) if command.startswith("rlgen ")]
    assert any(f"{command} ".startswith(f"rlgen {name} ".replace("  ", " ")) for command in typed)
    for command in typed:
        parse(command)


@pytest.mark.parametrize("page", PAGES)
def test_an_option_in_a_sentence_is_there(page: str) -> None:
    known = {option for _, command in docs.commands() for one in command.params for option in (*one.opts, *one.secondary_opts)}
    known |= {"--help", *(option for one in typer.main.get_command(app).params for option in one.opts)}
    named = set(re.findall(r"`(--[a-z-]+)", PAGES[page]))
    assert named - known - FOREIGN.keys() == set()


def test_what_is_to_be_made_can_be_made() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for text in PAGES.values() for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert "test" in named and named - targets == set()


def test_every_block_is_run_or_there_is_a_reason() -> None:
    """A page with commands is in one of the tables, so that a new one is not forgotten."""
    run_here = {"README", "watch", "look", "replay", "evaluation", "coming-from-trl", "recipe", "sentinel"}
    rest = [(page, command) for page, command in commands() if page not in run_here | OWN_TESTS.keys()]
    assert [one for one in rest if not one[1].startswith(tuple(NOT_RUN))] == []
    programs = {"README", "environments", "python", "rewards", "rollouts", "tools", *EXCERPTS}
    assert {page for page, kind, _ in blocks() if kind == "python"} == programs
    assert {kind for _, kind, _ in blocks()} == {"", "yaml", "python", "sh", "diff"}
    assert {page for page, kind, _ in blocks() if kind in ("sh", "diff")} <= OWN_TESTS.keys()
    for page, file in OWN_TESTS.items():
        assert f"{page}.md" in (ROOT / file).read_text()
    lines = [command for _, command in commands()]
    assert [known for known in NOT_RUN if not any(line.startswith(known) for line in lines)] == []


# --- recipes and functions -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples name."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECIPES = [(page, text) for page, kind, text in blocks() if kind == "yaml" and yaml.safe_load(text) and page not in OWN_TESTS]


@pytest.mark.parametrize(("page", "text"), RECIPES, ids=[page for page, _ in RECIPES])
def test_a_recipe_or_a_part_of_one_loads(page: str, text: str, folder: Path) -> None:
    part = yaml.safe_load(text)
    path = folder / "recipe.yaml"
    base = yaml.safe_load(RECIPE)
    path.write_text(text if "rewards" in part else yaml.safe_dump({**base, **part}))
    loaded = load_recipe(path)
    if page != "metrics":  # there the section changes what a broken rule does
        assert not [warning for warning in loaded.warnings if "no effect" in warning]
    for section, keys in part.items():
        assert type(loaded.recipe).model_fields[section] and all(
            loaded.origins.get(f"{section}.{key}", "") != "default" for key in (keys if isinstance(keys, dict) else ())
        )


def test_the_function_of_the_readme() -> None:
    (text,) = (text for page, kind, text in blocks() if page == "README" and kind == "python")
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["brevity"]("four words are here", [1, 2, 3, 4], "") == -0.004


# --- commands --------------------------------------------------------------------------------------------------------


def run(command: str) -> str:
    """Types a command; of what is piped to `jq` the path is looked up in the last line. Returns what was printed."""
    typed, *pipes = command.split(" | ")
    result = CliRunner().invoke(app, shlex.split(typed)[1:])
    assert result.exit_code == 0, (command, result.output, result.exception)
    if pipes:
        value: Any = json.loads(result.output.splitlines()[-1])
        assert pipes[0] == "tail -1" and pipes[1].startswith("jq .")
        for key in re.findall(r"\w+", pipes[1].removeprefix("jq ")):
            value = value[int(key)] if key.isdigit() else value[key]
        assert value is not None
    return result.output


@pytest.mark.parametrize("page", ["coming-from-trl", "recipe"])
def test_a_mistake_is_answered_as_the_page_says(page: str, folder: Path) -> None:
    for text in (text for name, kind, text in blocks() if name == page and kind == "" and text.startswith("$ ")):
        command, *said = shown(text)
        file = folder / command.split()[-1]
        file.write_text(MISTAKES[page])
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exception is not None
        wanted = [line for line in said if not line.endswith("nothing was started")]
        assert str(result.exception).replace(f"{folder}/", "").splitlines()[: len(wanted)] == wanted


SHORT = """\
run: {{name: demo}}
model: {{path: "tiny:qwen3"}}
data: {{source: "task:sort", chat: true}}
# places that the page shows
rewards: [{{use: exact_match}}]
rollout: {{prompts_per_step: 4}}
engine: {{kind: transformers}}
checkpoint: {{every: 3}}
{}
"""
MISTAKES = {
    "coming-from-trl": SHORT.format("trainer: {kind: grpo, num_iterations: 2}"),
    "recipe": SHORT.format("trainer: {kind: grpo, clip_hgih: 0.3}\noptim: {learning_rate: .nan}"),
}


# Of troubleshooting.md: examples, and messages that it explains.
ANSWERED = dict(re.findall(r"^```\n\$ rlgen (.+)\n((?:.*\n)+?)```$", PAGES["troubleshooting"], re.MULTILINE))
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGES["troubleshooting"], re.MULTILINE)


@pytest.mark.parametrize("command", ANSWERED)
def test_an_example_of_troubleshooting_answers_as_written(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**mistakes.FILES, "recipe.yaml": mistakes.RECIPE.replace("RUNS", "runs")}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command))
    said = result.output + (str(result.exception) + "\n" if result.exception else "")
    assert said.replace(f"{tmp_path}/", "") == ANSWERED[command]


def test_the_messages_of_troubleshooting_are_in_the_code() -> None:
    """Strings that the code cuts over two lines are put together."""
    source = " ".join(path.read_text() for path in sorted((ROOT / "rlgen").rglob("*.py")))
    whole = re.sub(r'"\s+f?"', "", source)
    assert len(ANSWERED) == 8 == PAGES["troubleshooting"].count("\n$ rlgen ") and len(MESSAGES) >= 15
    assert [message for message in MESSAGES if message not in whole] == []


@pytest.mark.slow
def test_the_commands_of_the_page_about_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "old", "new"):
        kind = "grpo" if name == "old" else "rloo"
        make_run(tmp_path / "runs" / name, steps=6, seed=len(name), recipe={"trainer": {"kind": kind}})
    for kind in ("grpo", "rloo"):
        for seed in range(3):
            bare_run(tmp_path / "runs" / f"{kind}-{seed}", [0.1 * step for step in range(9)], seed, {"trainer": {"kind": kind}})
    for _, command in commands("look"):
        run(command)
    assert (tmp_path / "runs" / "mine" / "report.html").exists() and (tmp_path / "old-and-new.png").exists()


EVALUATED = """\
run: {name: mine, steps: 18}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true}
rewards: [{use: exact_match}, {use: length, args: {target: 4}}]
rollout: {prompts_per_step: 2, group_size: 2, max_completion_tokens: 8}
engine: {kind: transformers}
trainer: {kind: grpo, updates_per_rollout: 2}
optim: {learning_rate: 1.0e-3}
checkpoint: {every: 6, keep: 9}
eval: {every: 9, limit: 4}
"""


@pytest.mark.slow
def test_the_commands_of_the_pages_about_evaluation_replay_and_watching(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(EVALUATED)
    train(Path("recipe.yaml"), TrainOptions())
    run("rlgen export mine --out model")
    for page in ("evaluation", "replay", "watch"):
        for _, command in commands(page):
            if command not in NOT_RUN:
                run(command)


def skeleton(line: str) -> str:
    """A line without its numbers, versions and spaces, which differ from machine to machine."""
    return " ".join(re.sub(r"[-+±]?\d[\w.+-]*", "#", line).split())


@pytest.mark.slow
def test_what_the_readme_shows_of_the_first_run_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlgen: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = (text for page, _, text in blocks() if page == "README" and text.startswith("$ rlgen init"))
    printed = ""
    for line in (line for line in text.splitlines() if line.startswith("$ ")):
        command = command_of(line)
        if command is None:
            assert line == "$ cd mine"
            monkeypatch.chdir(tmp_path / "mine")
            continue
        result = rlgen(*shlex.split(command)[1:])
        assert result.returncode == 0, result.stderr
        printed += result.stdout
    had = {skeleton(line) for line in printed.splitlines()}
    lines = [skeleton(line) for line in text.splitlines() if not line.startswith(("$ ", "…"))]
    assert [line for line in lines if line not in had] == []


@pytest.mark.slow
def test_what_the_page_shows_of_the_doctor_is_printed(monkeypatch: pytest.MonkeyPatch, rlgen: Any) -> None:
    monkeypatch.chdir(ROOT)
    (text,) = (text for page, _, text in blocks() if page == "sentinel" and text.startswith("$ rlgen doctor"))
    command, *lines = shown(text)
    had = {skeleton(line) for line in rlgen(*shlex.split(command)[1:]).stdout.splitlines()}
    versions = "vllm "  # and what the machine is
    assert [line for line in lines if skeleton(line) not in had and not line.startswith((versions, "…"))] == []
