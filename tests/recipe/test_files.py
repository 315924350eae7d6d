"""Recipes that extend others, keys that were renamed, files that are none, and secrets in a recipe."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RECIPE, Proof, Run, of_rows
from helpers.recipes import problems, written

from rlgen.recipe import LoadedRecipe, dump_recipe, load_recipe
from rlgen.recipe.hints import REFUSED

KEY = "sk-" + "planted0" * 4


Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda name, text: written(tmp_path, text, name)


def values(loaded: LoadedRecipe, *keys: str) -> list[object]:
    recipe: object = loaded.recipe.model_dump()
    found = []
    for key in keys:
        node = recipe
        for part in key.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]  # type: ignore[index]
        found.append(node)
    return found


def test_a_child_wins_over_its_parents_and_the_command_line_over_all(write: Write) -> None:
    base = write("base.yaml", RECIPE)
    middle = write("middle.yaml", "extends: base.yaml\nrollout: {group_size: 8, temperature: 0.9}\nrun: {seed: 3}\n")
    child = write(
        "child.yaml", "extends: middle.yaml\nrun: {steps: 7}\nrewards: [{use: exact_match}]\nrollout: {group_size: 6}\n"
    )
    loaded = load_recipe(child, ["rollout.temperature=0.8"])
    keys = ("run.steps", "run.seed", "run.name", "rollout.group_size", "rollout.temperature", "rollout.prompts_per_step")
    assert values(loaded, *keys) == [7, 3, "test", 6, 0.8, 4]
    assert [reward.use for reward in loaded.recipe.rewards] == ["exact_match"]  # lists replace
    assert loaded.origins["run.steps"] == f"{child}:2:7"
    assert loaded.origins["run.seed"] == f"{middle}:3:7" and loaded.origins["rollout.prompts_per_step"] == f"{base}:7:11"
    assert loaded.origins["rollout.temperature"].startswith("--set 1") and loaded.origins["rewards.0.use"] == f"{child}:3:12"
    assert loaded.text == child.read_text()
    again = write("resolved.yaml", dump_recipe(loaded.recipe))  # needs none of the parents
    base.unlink()
    assert dump_recipe(load_recipe(again).recipe) == again.read_text()


def test_another_kind_starts_its_section_anew(write: Write) -> None:
    write("base.yaml", RECIPE + "engine: {kind: colocated, sleep: true}\ntrainer: {kind: grpo, loss: cispo}\n")
    loaded = load_recipe(write("child.yaml", "extends: base.yaml\nengine: {kind: transformers}\ntrainer: {beta: 0.1}\n"))
    assert loaded.recipe.engine.kind == "transformers" and values(loaded, "trainer.loss", "trainer.beta") == ["cispo", 0.1]


@pytest.mark.parametrize(
    "chain, expected",  # sections of the last parent, of its child, …; then the trainer's or optimizer's settings
    [
        (["trainer: {beta: 0.5}", "trainer: {kind: grpo, loss: cispo}"], {"kind": "grpo", "beta": 0.5, "loss": "cispo"}),
        (["trainer: {kind: rloo, beta: 0.5}", "trainer: {kind: grpo}"], {"kind": "grpo", "beta": 0.0}),
        (["trainer: {kind: rloo}", "trainer: {beta: 0.5}", "trainer: {kind: grpo}"], {"kind": "grpo", "beta": 0.0}),
        (["trainer: {kind: rloo, beta: 0.5}", "trainer: {use: 'own.py:A'}"], {"kind": "own", "beta": 0.0}),
        (["trainer: {use: 'own.py:A'}", "trainer: {kind: own, beta: 0.5}"], {"kind": "own", "beta": 0.5}),
        (["trainer: {use: 'own.py:A', beta: 0.5}", "trainer: {kind: grpo}"], {"kind": "grpo", "beta": 0.0}),
        (["optim: {learning_rate: 0.5}", "optim: {kind: adamw_8bit}"], {"kind": "adamw_8bit", "learning_rate": 0.5}),
    ],
)
def test_a_kind_that_is_not_written_counts(write: Write, chain: list[str], expected: dict[str, object]) -> None:
    path = write("0.yaml", RECIPE.partition("optim")[0] + chain[0])
    for number, section in enumerate(chain[1:], 1):
        path = write(f"{number}.yaml", f"extends: {number - 1}.yaml\n{section}\n")
    held = getattr(load_recipe(path).recipe, chain[0].partition(":")[0])
    assert {key: getattr(held, key) for key in expected} == expected


def test_paths_start_at_the_file_that_names_them(write: Write, tmp_path: Path) -> None:
    write("below/base.yaml", of_rows("rows.jsonl") + "run2: 1\n")
    child = write("child.yaml", "extends: below/base.yaml\nrewards: [{use: 'r.py:f'}]\n")
    assert len(problems(child)) == 1
    write("below/base.yaml", of_rows("rows.jsonl"))
    recipe = load_recipe(child).recipe
    assert recipe.data.source == str(tmp_path / "below/rows.jsonl") and recipe.rewards[0].use == f"{tmp_path}/r.py:f"


def test_extends_follows_links_and_the_home_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, child = write("real/base.yaml", RECIPE), write("real/below/child.yaml", "extends: ../base.yaml\nrun: {seed: 3}\n")
    (tmp_path / "link.yaml").symlink_to(child)
    (tmp_path / "folder").symlink_to(child.parent)
    for path in (tmp_path / "link.yaml", tmp_path / "folder/child.yaml"):
        loaded = load_recipe(path)
        assert values(loaded, "run.seed", "run.steps") == [3, 2] and loaded.origins["run.steps"] == f"{base}:1:19"
    monkeypatch.setenv("HOME", str(tmp_path / "real"))
    assert values(load_recipe(write("home.yaml", "extends: ~/base.yaml\n")), "run.steps") == [2]
    monkeypatch.chdir(tmp_path)  # a path that was written relative is told so
    (tmp_path / "copy.yaml").symlink_to(base)
    assert load_recipe(Path(write("short.yaml", "extends: copy.yaml\n").name)).origins["run.steps"] == "copy.yaml:1:19"


@pytest.mark.fault(10)
def test_a_chain_that_does_not_end_or_is_broken_is_shown(write: Write, tmp_path: Path, proof: Proof) -> None:
    a, b = write("a.yaml", "extends: b.yaml\n"), write("b.yaml", "# b\nextends: ./a.yaml\n")
    chain = f"{a} → {b} → {a}"
    assert problems(a) == [f"{b}:2:1: extends itself: {chain}; remove one `extends`"]
    gone = write("gone.yaml", "run: {seed: 1}\nextends: nowhere.yaml\n")
    (told,) = problems(gone)
    assert told.startswith(f"{gone}:2:1: extends: {tmp_path}/nowhere.yaml does not exist ({gone} → {tmp_path}/nowhere.yaml)")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (told,) = problems(write("r.yaml", "extends: loop.yaml\n"))
    assert told.startswith(
        f"{tmp_path}/r.yaml:1:1: extends: {tmp_path}/loop.yaml cannot be read: Too many levels of symbolic links"
    )
    for number in range(20):
        write(f"{number}.yaml", f"extends: {number + 1}.yaml\n")
    assert "extends more than 8 files" in problems(tmp_path / "0.yaml")[0]
    for bad in ("[a.yaml]", "3", "", "{a: b}"):
        assert problems(write("bad.yaml", f"extends: {bad}\n")) == [
            f"{tmp_path}/bad.yaml:1:1: extends: must be the path of one recipe, as text"
        ]
    assert "stands at the top of a recipe file" in problems(write("r.yaml", RECIPE), "extends=a.yaml")[0]
    proof(f"a cycle: {chain}")


@pytest.mark.fault(10)
def test_a_mistake_in_a_parent_is_located_there(write: Write, proof: Proof) -> None:
    base = write("base.yaml", RECIPE.replace("group_size: 4", "group_sise: 4") + "run: {}\n")
    child = write("child.yaml", "extends: base.yaml\nrun: {stesp: 3}\n")
    told = problems(child, "optim.learning_rate=-1")
    assert [line.partition(": ")[0] for line in told] == [f"{child}:2:7", f"{base}:7:32", f"{base}:9:1", "--set 1"]
    assert "did you mean `group_size`" in told[1] and all(f"(extended: {child} → {base})" in line for line in told[1:3])
    write("base.yaml", "- a list\n")
    assert "base.yaml:1:1: a recipe is a mapping" in problems(child)[0]
    proof(told[1])


@pytest.mark.fault(11)
def test_a_renamed_key_says_its_new_name(write: Write, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    monkeypatch.setitem(REFUSED, "optim.step_size", "renamed to `learning_rate` in version 0.2.0")
    monkeypatch.setitem(REFUSED, "rewards.*.function", "renamed to `use` in version 0.2.0")
    path = write(
        "r.yaml", RECIPE.replace("optim: {learning_rate:", "optim: {step_size:").replace("{use: length", "{function: length")
    )
    told = problems(path)
    assert f"{path}:8:9: `step_size` is not a key of `optim`; renamed to `learning_rate` in version 0.2.0" in told
    assert any("`function` is not a key of `rewards.1`; renamed to `use` in version 0.2.0" in line for line in told)
    proof(told[-1])


@pytest.mark.fault(8)
def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    expected = {
        "-": "standard input cannot be a recipe; name a recipe file",
        "https://example.org/r.yaml": "is an address, but a recipe must be a file; download it and read it first",
        "file:///r.yaml": "is an address",
        "nowhere.yaml": "does not exist",
        ".": "is a folder",
        "pipe": "is a pipe or a device",
        "/dev/zero": "is a pipe or a device",
        "/proc/self/mem": "cannot be read: Input/output error",
        "a" * 300: "cannot be read: File name too long",
        "r.yaml/r.yaml": "cannot be read: Not a directory",
        "nul\0l": "cannot be read",
    }
    Path("r.yaml").write_text(RECIPE)
    for name, what in expected.items():
        (told,) = problems(Path(name))
        assert what in told
    proof(", ".join(name[:20] for name in expected if "\0" not in name))


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    "content, what",
    [
        ("run: {}\n".encode("utf-16"), ": is not text in UTF-8 (byte 0, line 1)"),
        (b"run: {}\n\x89PNG\r\n\x1a\n\x00", ": is not text in UTF-8 (byte 8, line 2)"),
        (b"a: 'open\nb: 1\n", ":3:1: not YAML: while scanning a quoted scalar found unexpected end of stream"),
        (b"run:\n  name: a\n steps: 3\n", ":3:2: not YAML"),
        (b"run:\n\tname: a\n", ":2:1: not YAML"),
        (b'run: {name: "\\ud800"}\n', ":1:13: holds a character that text cannot hold"),
        (b"? [a, b]\n: 1\n", ":1:3: a key must be plain text"),
    ],
)
def test_no_text_or_no_yaml(tmp_path: Path, content: bytes, what: str, proof: Proof) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert any(f"{path}{what}" in line for line in problems(path))
    proof(repr(content[:20]))


SECRETS = {
    "rewards.0.args={api_key: abc}": "rewards.0.args.api_key",
    "rewards.0.args.api_key=abc": "rewards.0.args.api_key",
    "rewards.0.args={judge: {auth_token: abc}}": "rewards.0.args.judge.auth_token",
    f"rewards.0.args.model={KEY}": "rewards.0.args.model",
    f"engine.extra={{hf_token: {KEY}}}": "engine.extra.hf_token",
    "engine.extra={speculative_config: {password: abc}}": "engine.extra.speculative_config.password",
    "model.path=https://me:abc@example.org/model": "model.path",
    "data.system='call with Bearer abcdef0123456789'": "data.system",
    "rewards.0.args.header=the-value-of-a-variable": "rewards.0.args.header",
}


@pytest.mark.fault(87)
@pytest.mark.parametrize("override, where", SECRETS.items())
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(
    write: Write, monkeypatch: pytest.MonkeyPatch, override: str, where: str, proof: Proof
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "the-value-of-a-variable")
    (told,) = problems(write("r.yaml", RECIPE), override)
    assert f"{where} holds a secret; put it into an environment variable" in told
    assert "abc" not in told and KEY not in told and "the-value" not in told
    proof(f"{where} refused")


@pytest.mark.fault(87)
def test_a_secret_in_a_file_is_refused_in_comments_too(write: Write, proof: Proof) -> None:
    args = RECIPE.replace("args: {target: 6}", "args: {target: 6, api_key: abc}")
    path = write("r.yaml", f"# judge: {KEY}\n{args}")
    told = problems(path)
    assert [line.partition(": ")[0] for line in told] == [f"{path}:1:1", f"{path}:7:37"] and KEY not in str(told)
    write("base.yaml", path.read_text())
    assert len(problems(write("child.yaml", "extends: base.yaml\n"))) == 2
    names = RECIPE.replace(
        "args: {target: 6}", "args: {target: 6, api_key_env: OPENAI_API_KEY, eos_token: x, max_tokens: 5, token: ''}"
    )
    load_recipe(write("r.yaml", names))  # names of variables, and other tokens
    proof("a comment and an argument")


def test_names_with_dots_and_odd_values_are_shown(rlgen: Run, write: Write) -> None:
    path = write("r.yaml", RECIPE.replace("args: {target: 6}", "args: {target: 6, 'a.b': {'0': 1}}"))
    shown = rlgen("show", path, "--json")
    assert json.loads(shown.stdout)["rewards.1.args.a.b.0"]["value"] == 1


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    "override", ["data={source: ~nobody-at-all/x.jsonl}", f"model.path=./{'a' * 4000}", "rewards.0.use=~no-one/r.py:f"]
)
def test_what_is_no_path_is_blamed_on_its_argument(write: Write, override: str, proof: Proof) -> None:
    (told,) = problems(write("r.yaml", RECIPE), override)
    assert told.startswith("--set 1: ") and " is not a path: " in told and len(told) < 600
    proof(told[:100])


def test_a_folder_whose_name_is_no_text_is_refused(write: Write) -> None:
    path = write(os.fsdecode(b"caf\xe9/r.yaml"), of_rows("rows.jsonl"))
    assert ": 'rows.jsonl' is not a path: a folder above it has a name that is not UTF-8" in problems(path)[0]
    assert load_recipe(write(os.fsdecode(b"caf\xe9/s.yaml"), RECIPE)).recipe.data.source == "task:sort"
