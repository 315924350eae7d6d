"""Every mistake of `mistakes.py` is answered by a message that contains the remedy, and leaves nothing behind."""

from pathlib import Path

import pytest
from recipe.mistakes import FILES, MISTAKES, RECIPE, Mistake

from rlgen.errors import RlgenError


def written(mistake: Mistake | None, folder: Path) -> Path:
    """The recipe with the mistake, and the files that it names."""
    text = RECIPE.replace("RUNS", str(folder / "runs"))
    changes = () if mistake is None else (mistake.change,) if isinstance(mistake.change, str) else mistake.change
    for change in changes:
        section = change.removeprefix("-").partition(":")[0]
        kept = [line for line in text.splitlines() if not line.startswith(f"{section}:")]
        text = "\n".join([*kept, *([] if change.startswith("-") else [change])]) + "\n"
    for name, content in {**FILES, **({} if mistake is None else mistake.files)}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def run(command: str, recipe: Path) -> None:
    from rlgen.cli.rewards import rewards_test_command
    from rlgen.cli.validate import validate_command

    if command == "train":
        from rlgen.setup.attempt import train

        train(recipe)
    elif command == "rewards test":
        rewards_test_command(recipe, [], 2, as_json=False)
    else:
        validate_command(recipe, [], as_json=False, count=2 if command == "look" else 0)


def answer(mistake: Mistake, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RLGEN_SERVER_TOKEN", "0123456789abcdef")
    path = written(mistake, folder)
    if mistake.code == 0:
        run(mistake.command, path)
        return capsys.readouterr().out
    with pytest.raises(RlgenError) as caught:
        run(mistake.command, path)
    assert caught.value.exit_code == mistake.code
    return str(caught.value)


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 190 and len({(str(m.change), m.command) for m in MISTAKES.values()}) == len(MISTAKES)


def test_the_recipe_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("validate", written(None, tmp_path))
    said = capsys.readouterr().out
    assert f"{tmp_path}/recipe.yaml: valid" in said and "warning" not in said


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    said = answer(mistake, tmp_path, capsys, monkeypatch)
    remedies = (mistake.remedy,) if isinstance(mistake.remedy, str) else mistake.remedy
    assert [remedy for remedy in remedies if remedy not in said] == [], said
    if mistake.code == 2 and mistake.command == "validate":
        assert f"{tmp_path}/recipe.yaml" in said, "the message does not say where"
        assert len(said.splitlines()) == 1, "one mistake, one line"
    if mistake.code != 6:  # the engine's log stays
        assert not (tmp_path / "runs").exists()
