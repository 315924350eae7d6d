"""Whatever stands in a file or behind `--set`, the loader answers with a recipe or a RecipeError, soon and in little memory."""

import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, Proof
from helpers.recipes import problems, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlgen.errors import RecipeError
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.recipe.keys import places_of_keys
from rlgen.recipe.source import MAX_BYTES

SECONDS, MIB = 2.0, 300.0

FEW = settings(deadline=None, derandomize=True, database=None, max_examples=200, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, derandomize=False, max_examples=6000)


def memory(field: str) -> float:
    """MiB of this process: `VmRSS` is held now, `VmHWM` was held at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


class Worst:
    """The most that one load took."""

    def __init__(self) -> None:
        self.seconds = self.mib = 0.0
        self.loads = self.recipes = 0

    def load(self, path: Path, overrides: list[str] | None = None) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest so far
        gc.freeze()  # what the tests before have left is not looked through while the loader is timed
        held, began = memory("VmRSS"), time.process_time()
        self.loads += 1
        try:
            loaded = load_recipe(path, overrides or [])
            resolved = dump_recipe(loaded.recipe)
            self.recipes += 1
        except RecipeError as error:
            assert 0 < len(error.problems) <= 101 and len(str(error)) < 200_000
            assert all(len(line) < 5000 for line in str(error).splitlines())
            resolved = None
        seconds, mib = time.process_time() - began, memory("VmHWM") - held
        gc.unfreeze()
        self.seconds, self.mib = max(self.seconds, seconds), max(self.mib, mib)
        assert seconds < SECONDS and mib < MIB, (
            f"{path.read_bytes()[:40]!r} with {str(overrides)[:40]} took {seconds:.2f} s and {mib:.0f} MiB"
        )
        if resolved is not None:
            again = path.with_name("again.yaml")
            again.write_text(resolved, encoding="utf-8")
            assert dump_recipe(load_recipe(again).recipe) == resolved

    def __str__(self) -> str:
        return f"{self.loads} loads, {self.recipes} of them recipes: {self.seconds:.2f} s and {self.mib:.0f} MiB at most"


# What an odd value looks like, in YAML.
ODD = r"""
8 2 1 0.5 x -1 0 1e308 1e999 .nan -.inf '8' 8.5 true null ~ [] {} [[[]]] {a:{b:c}} '\0' "\0" "\ud800" "\x1b[31m"
&a|[*a] &a|{<<:|*a} *a !!python/object/apply:os.system|[id] !x
task: task:sort task:sotr tiny: tiny:no ~nobody ~nobody/x / . .. x.py:f x.py: :f a:b:c ** [ ] { } -|- ?| > %YAML|9.9 --- ...
http://[ 'http://[::1' http://a:99999999
"""
WORDS = st.sampled_from(
    [word.replace("|", " ") for word in ODD.split()]
    + ["|", "\t", "\x85", "'" + "a" * 4000 + "'", "9" * 400, "9" * 30]
    + ["\u00b2", "\uff11", "\u0661", "\U0001f600", "\u202e", "\ufeff"]  # digits and marks of other scripts
)
VALUES = WORDS | st.text(max_size=30) | st.floats().map(repr) | st.integers().map(str)


KEYS = sorted({path.replace(".*", "") for places in places_of_keys().values() for path in places})
MORE = ("health.entropy.steps", "rewards.0", "rewards.0.use", "rewards.1.args.target", "rewards.-1", "rewards.\u00b2", "extends")
PATHS = st.sampled_from([*KEYS, *MORE])
OVERRIDES = st.lists(
    st.builds("{}={}".format, PATHS, VALUES)
    | st.builds("{}.{}={}".format, PATHS, st.text(max_size=5), VALUES)
    | st.text(max_size=40),
    min_size=1,
    max_size=3,
)
SEEDS = [RECIPE.encode(), *(path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml")))]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A recipe with pieces cut out, doubled, swapped for others."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 6))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
        piece = draw(st.one_of(VALUES.map(lambda value: value.encode("utf-8", "surrogatepass")), st.binary(max_size=8)))
        kind = draw(st.sampled_from(["insert", "replace", "double", "cut"]))
        new = {"insert": piece, "replace": piece, "double": text[at : at + length] * 2, "cut": b""}[kind]
        text = text[:at] + new + text[at + (0 if kind == "insert" else length) :]
    return text


def of_files(worst: Worst, path: Path, profile: settings) -> None:
    @settings(profile)
    @given(st.binary(max_size=300) | mutated() | st.text(alphabet="[]{}:,-&*!|>?%@ \n#'\"a1", max_size=80).map(str.encode))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        worst.load(path)

    check()


def of_overrides(worst: Worst, path: Path, profile: settings) -> None:
    path.write_text(RECIPE)

    @settings(profile)
    @given(OVERRIDES)
    def check(overrides: list[str]) -> None:
        worst.load(path, overrides)

    check()


@pytest.mark.fault(4, 6, 9)
@pytest.mark.parametrize("check", [of_files, of_overrides])
def test_any_input(tmp_path: Path, proof: Proof, check: Callable[[Worst, Path, settings], None]) -> None:
    worst = Worst()
    check(worst, tmp_path / "r.yaml", FEW)
    assert 0 < worst.recipes < worst.loads  # both kinds have come
    proof(str(worst))


def test_a_key_that_text_cannot_hold(tmp_path: Path) -> None:
    (said,) = problems(written(tmp_path, RECIPE), "data.template_args.\0=8")
    assert said.startswith("--set 1: ") and ": a key must be plain text" in said


@pytest.mark.slow
@pytest.mark.fault(4, 6, 9)
@pytest.mark.parametrize("check", [of_files, of_overrides])
def test_any_input_at_length(tmp_path: Path, proof: Proof, check: Callable[[Worst, Path, settings], None]) -> None:
    worst = Worst()
    check(worst, tmp_path / "r.yaml", MANY)
    proof(str(worst))


def laughs(levels: int, width: int) -> str:
    lines = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(["a0: &a0 [x]", *lines])


def full(piece: str, end: str = "") -> str:
    """As many as a recipe can be long."""
    return piece * ((MAX_BYTES - len(end)) // len(piece)) + end


HUGE = {
    "brackets": "[" * 100_000,
    "braces": "{a: " * 60_000,
    "dashes": "- " * 100_000,
    "question marks": "? " * 100_000,
    "indents": "\n".join(" " * i + "a:" for i in range(600)),
    "billion laughs": laughs(40, 10),
    "merges": "a0: &a0 {x: 1}\n" + "\n".join(f"a{i}: &a{i} {{<<: *a{i - 1}, b: *a{i - 1}}}" for i in range(1, 5000)),
    "anchors": full("&a "),
    "tags": full("!t "),
    "comment": full("#"),
    "comments": full("#\n"),
    "keys": full("".join(f"k{i}: 1\n" for i in range(3))),
    "many keys": "".join(f"k{i}: 1\n" for i in range(5_900)),
    "keys in braces": "run: {" + ",".join(f"k{i}: 1" for i in range(5_900)) + "}",
    "list": "rewards: [" + full("1,", "]")[:-11],
    "rewards": "rewards: [" + "{use: exact_mach}," * 3_900 + "]",
    "servers": "engine: {kind: server, url: [" + "'http://a:1'," * 11_000 + "]}",
    "number": "run: {steps: " + "9" * 250_000 + "}",
    "fraction": "run: {steps: 0." + "9" * 250_000 + "}",
    "text": "run: {name: '" + "x" * 250_000 + "'}",
    "key": "? '" + "x" * 250_000 + "'\n: 1",
    "quotes": full('"'),
    "open quote": "a: '" + "x" * 250_000,
    "folded": "a: >\n" + full(" x\n")[:-10],
    "blanks": full(" "),
    "lines": full("\n"),
    "tabs": full("\t"),
    "colons": full(":"),
    "hostile colons": "rewards: [{use: '" + full("a:", "'}]")[:-20] + "'}]",
    "unknown tags": "a: [" + "!x y," * 9_000 + "]",
    "secrets": full("# hf_" + "a" * 30 + "\n"),
    "half secrets": full("password: " + " " * 20 + "eyJ-"),
    "urls": full("://" + "a" * 100),
}


WORST = ("brackets", "billion laughs", "many keys", "rewards", "servers", "text", "hostile colons", "half secrets")


@pytest.mark.fault(6)
@pytest.mark.parametrize("names", [WORST, pytest.param(tuple(HUGE), marks=pytest.mark.slow)], ids=["worst", "all"])
def test_no_input_is_too_large_or_too_deep(tmp_path: Path, proof: Proof, names: tuple[str, ...]) -> None:
    worst = Worst()
    path = tmp_path / "r.yaml"
    for name in names:
        path.write_text(HUGE[name])
        worst.load(path)
    path.write_bytes(b"\0" * (MAX_BYTES + 1))
    worst.load(path)
    path.write_text(RECIPE)
    deep = "a." * 3_000
    for override in (f"{deep}b=1", f"rewards.0.args.{deep}b=1", "data.options=" + "[" * 90_000, "run.name=" + "x" * 100_000):
        worst.load(path, [override])
    assert (worst.recipes, worst.loads) == (0, len(names) + 5)
    worst.load(path, [f"rewards.0.args.k{index}={index}" for index in range(300)])
    assert worst.recipes == 1  # an argument that nobody takes is found with the rewards
    proof(str(worst))


def test_what_is_refused_quotes_little(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE + f"? '{'x' * 100_000}'\n: 1\n")
    said = "\n".join(problems(path, "run.name=" + "y" * 100_000))
    assert len(said) < 1000 and said.count("…") == 3
