import ast
import base64
import json
import re
import sys

import pytest

from rlgen.data.tasks import COLOURS, TASKS, generate
from rlgen.errors import DataError, SetupError
from rlgen.recipe.data import TASKS as OPTIONS
from rlgen.recipe.data import ArithmeticOptions, CountdownOptions, GymOptions, ReverseOptions, SortOptions, WordProblemsOptions


def test_every_task_of_the_recipe_has_a_generator():
    assert TASKS.keys() | {"gym"} == OPTIONS.keys()  # whose rows are another package's


@pytest.mark.parametrize("name", sorted(TASKS))
def test_rows_follow_from_seed_and_index(name):
    small, large = OPTIONS[name](size=50), OPTIONS[name](size=200)
    assert generate(name, small, 7) == generate(name, large, 7)[:50]
    assert generate(name, small, 7) != generate(name, small, 8)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_prompt_twice_while_there_are_others(name):
    rows = generate(name, OPTIONS[name](size=1000), 0)
    assert len({(row["prompt"], *row.get("images", ())) for row in rows}) == 1000


def test_a_small_space_is_used_up_before_anything_repeats():
    rows = generate("arithmetic", ArithmeticOptions(size=150, digits=1, operators="+"), 3)
    assert len(rows) == 150
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_arithmetic_answers_are_the_values_of_the_questions():
    rows = generate("arithmetic", ArithmeticOptions(size=300, digits=2, terms=4, operators="+-*"), 1)
    assert len(rows) == 300
    for row in rows:
        question = row["prompt"].removesuffix("=")
        assert str(eval(question)) == row["answer"]
        assert re.fullmatch(r"[1-9]\d([-+*][1-9]\d){3}", question)


def test_colours_of_halves():
    """A quarter of the rows are texts; the others' answer is the colour of the half that is asked about."""
    rows = generate("colours", OPTIONS["colours"](size=200, side=4), 0)
    pictured = [row for row in rows if row["images"]]
    assert 30 < 200 - len(pictured) < 70
    for row in pictured:
        pixels = base64.b64decode(row["images"][0].partition(",")[2]).removeprefix(b"P6 4 4 255\n")
        first = 0 if "left" in row["prompt"] else 9
        assert len(pixels) == 48 and all(abs(a - b) <= 10 for a, b in zip(pixels[first:], COLOURS[row["answer"]], strict=False))
    for row in (row for row in rows if not row["images"]):
        place = ("first", "second", "third", "last").index(row["prompt"].split()[-1].removesuffix("?"))
        assert row["prompt"].partition(".")[0].split(", ")[place] == row["answer"]


def test_reverse_and_sort():
    reversed_ = generate("reverse", ReverseOptions(size=100, min_length=2, max_length=4, alphabet="xyz"), 0)
    sorted_ = generate("sort", SortOptions(size=100), 0)
    assert len(reversed_) == len(sorted_) == 100
    for row in reversed_:
        assert re.fullmatch(r"reverse: [xyz]{2,4}", row["prompt"])
        assert row["answer"] == row["prompt"].removeprefix("reverse: ")[::-1]
    for row in sorted_:
        assert "".join(sorted(row["prompt"].removeprefix("sort: "))) == row["answer"]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_countdown_answers_reach_the_target_with_each_number_once(count):
    rows = generate("countdown", CountdownOptions(size=200, numbers=count, largest=30), 5)
    assert len(rows) == 200
    for row in rows:
        assert eval(row["answer"]) == row["target"]
        used = [node.value for node in ast.walk(ast.parse(row["answer"])) if isinstance(node, ast.Constant)]
        assert sorted(used) == sorted(row["numbers"])
        assert set(row["answer"]) <= set("0123456789()+-*")
        assert 1 <= row["target"] <= count * 30
        assert all(str(number) in row["prompt"] for number in (*row["numbers"], row["target"]))


def solved(said: str) -> int:
    """The answer to a word problem by what its sentences say."""
    first, *others = map(int, re.findall(r"\d+", said))
    if re.search(r" (gives away|loses) \d+( of them)?\.", said) and "buys" not in said:
        return first - others[0]
    if "buys" in said and "then loses" in said:
        return first + others[0] - others[1]
    if "bags with" in said:
        return first * others[0] + others[1]
    if re.search(r"Each bag has|dollars each| a day", said):
        return first * others[0]
    return first + sum(others)


def test_word_problems_are_answered_by_their_sentences():
    rows = generate("word_problems", WordProblemsOptions(size=600, largest=12, two_steps=0.5), 2)
    assert len(rows) == 600
    for row in rows:
        assert int(row["answer"]) == solved(row["prompt"]) >= 0, row
        assert row["prompt"].endswith("? Reply with the number only.") and "{" not in row["prompt"]


def test_the_share_of_problems_of_two_steps():
    for share in (0.0, 1.0):
        rows = generate("word_problems", WordProblemsOptions(size=50, two_steps=share), 0)
        assert {len(re.findall(r"\d+", row["prompt"])) for row in rows} == {2 + int(share)}


STUB = """
class Sums:
    def __init__(self, size, seed, terms=2):
        if terms < 2:
            raise AssertionError("terms must be 2 or more")
        self.size, self.seed, self.terms = size, seed, terms

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"] and entry["metadata"]["source_dataset"] == "sums")

    def __iter__(self):
        for index in range(self.size):
            facts = {"source_dataset": "sums", "source_index": index, "pair": (1, 2)}
            value = self.seed + index * self.terms
            yield {"question": f"{self.seed}+{index}*{self.terms}=", "answer": str(value), "metadata": facts}

class Pairs(Sums):
    def score_answer(self, answer, entry):
        return float(entry["metadata"]["pair"] == (1, 2))  # in JSON it is a list

DATASETS = {"sums": (Sums, None), "pairs": (Pairs, None)}

def create_dataset(name, **settings):
    return DATASETS[name][0](**settings)
"""


@pytest.fixture
def gym_package(tmp_path, monkeypatch):
    """A package of the shape of reasoning-gym, with one data set."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("")
    (tmp_path / "reasoning_gym" / "factory.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        sys.modules.pop(name, None)


def test_rows_of_a_gym(gym_package):
    rows = generate("gym", GymOptions(dataset="sums", size=3, config={"terms": 5}), 7)
    assert [(row["prompt"], row["answer"]) for row in rows] == [("7+0*5=", "7"), ("7+1*5=", "12"), ("7+2*5=", "17")]
    assert json.loads(rows[2]["metadata"]) == {"source_dataset": "sums", "source_index": 2, "pair": [1, 2]}


@pytest.mark.parametrize(
    ("dataset", "config", "said"),
    [
        ("sum", {}, "has no data set `sum`; did you mean `sums`"),
        ("zzz", {}, "has no data set `zzz`; there are pairs, sums"),
        ("pairs", {}, "pairs cannot be used: its scorer compares values that JSON cannot hold"),
        ("sums", {"terms": 1}, "refuses it: terms must be 2 or more"),
        ("sums", {"term": 3}, "unexpected keyword argument 'term'"),
        ("sums", {"seed": 3}, "multiple values for keyword argument 'seed'"),
    ],
)
def test_what_a_gym_refuses(gym_package, dataset, config, said):
    with pytest.raises(DataError, match=re.escape(said)):
        generate("gym", GymOptions(dataset=dataset, config=config), 0)


def test_without_the_package_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(SetupError, match=r"task:gym needs reasoning-gym: pip install 'rlgen\[gym\]'"):
        generate("gym", GymOptions(dataset="chain_sum"), 0)


def test_every_data_set_of_the_real_gym_is_scored_right_or_refused():
    factory = pytest.importorskip("reasoning_gym.factory")
    from rlgen.rewards.gym import reasoning_gym

    refused, without_answer, wrong, lenient = set(), set(), set(), set()
    for name in sorted(factory.DATASETS):
        try:
            (row,) = generate("gym", GymOptions(dataset=name, size=1), 3)
        except DataError:
            refused.add(name)
            continue
        if row["answer"] is None:
            without_answer.add(name)
            continue
        marked = reasoning_gym(f"So it is <answer>{row['answer']}</answer>.", row["answer"], row["metadata"])
        given = (marked, reasoning_gym(row["answer"], row["answer"], row["metadata"]))
        try:
            bad = reasoning_gym("no idea at all", row["answer"], row["metadata"])
        except ValueError:  # a few scorers raise at what is no number, which is a failure of the reward
            bad = 0.0
        if given != (1.0, 1.0):
            wrong.add(name)
        if bad == 1.0:
            lenient.add(name)
    assert refused == {"arc_agi", "composite", "rearc"} and wrong == set()
    assert lenient == {"game_of_life_halting"}  # its scorer takes any text for a right answer
    assert without_answer == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
