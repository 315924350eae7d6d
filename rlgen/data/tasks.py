"""Built-in tasks: `task:NAME` needs no file and no network. Options and seed alone decide the rows, on every machine.

A row depends on the seed, its index and the rows before it, so a larger size keeps the rows of a smaller one. The rows of
`task:gym` are those of the package reasoning-gym, and follow from its version too.
"""

import base64
import json
from collections.abc import Callable
from difflib import get_close_matches
from random import Random
from typing import Any

from rlgen.errors import DataError, SetupError
from rlgen.recipe.data import (
    ArithmeticOptions,
    ColoursOptions,
    CountdownOptions,
    GymOptions,
    ReverseOptions,
    SortOptions,
    WordProblemsOptions,
)

Row = dict[str, Any]

# Draws without a new prompt after which a prompt may be repeated.
MAX_DRAWS = 1000

COLOURS = {
    **{"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 220)},
    **{"yellow": (240, 220, 40), "black": (15, 15, 15), "white": (245, 245, 245)},
}

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Karen", "Leo", "Lucy", "Maria"),
    *("Max", "Mia", "Noah", "Olga", "Peter", "Rosa", "Sam", "Tina", "Tom", "Victor"),
)
THINGS = (
    *("apples", "balls", "books", "cakes", "cards", "coins", "cookies", "cups", "eggs", "flags", "hats", "keys", "maps"),
    *("nuts", "pears", "pens", "plates", "rings", "shells", "toys"),
)
# Problems of one and of two operations, and what answers them.
ONE_STEP = (
    ("{name} has {a} red {things} and {b} blue {things}. How many {things} does {name} have?", "sum"),
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have?", "sum"),
    ("{name} has {sum} {things} and gives away {b}. How many are left?", "a"),
    ("{name} has {sum} {things} and loses {b} of them. How many {things} does {name} have now?", "a"),
    ("{name} has {a} bags. Each bag has {b} {things}. How many {things} is that?", "product"),
    ("{name} buys {a} {things} for {b} dollars each. How many dollars does {name} pay?", "product"),
    ("{name} makes {a} {things} a day. How many {things} does {name} make in {b} days?", "product"),
)
TWO_STEPS = (
    ("{name} has {a} {things}, buys {b} more and then loses {few}. How many {things} are left?", "many"),
    ("{name} has {a} red, {b} blue and {c} green {things}. How many {things} is that?", "all"),
    ("{name} has {a} bags with {b} {things} each and {c} more {things}. How many {things} is that?", "product_and_c"),
)


def generate(name: str, options: Any, seed: int) -> list[Row]:
    """Returns the rows of task `name`, with text columns `prompt` and `answer`; countdown adds `numbers` and `target`, colours
    adds `images`. `options`: the task's option model, from the recipe. Raises as `gym`.
    """
    if isinstance(options, GymOptions):
        return gym(options, seed)
    draw = TASKS[name]
    rows: list[Row] = []
    seen: set[str] = set()
    exhausted = False
    for index in range(options.size):
        rng = Random(f"{name}/{seed}/{index}")
        for _ in range(1 if exhausted else MAX_DRAWS):
            row = draw(rng, options)
            if asked(row) not in seen:
                break
        exhausted = exhausted or asked(row) in seen
        seen.add(asked(row))
        rows.append(row)
    return rows


def asked(row: Row) -> str:
    """Returns what the model sees of a row: its prompt and its pictures."""
    return "".join([row["prompt"], *row.get("images", ())])


def arithmetic(rng: Random, options: ArithmeticOptions) -> Row:
    """Returns a row such as {"prompt": "37+15*2=", "answer": "67"}; numbers have exactly `digits` digits, * binds first."""
    low = 10 ** (options.digits - 1) if options.digits > 1 else 0
    numbers = [rng.randint(low, 10**options.digits - 1) for _ in range(options.terms)]
    operators = [rng.choice(options.operators) for _ in range(options.terms - 1)]
    question, summands = str(numbers[0]), [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        question += f"{operator}{number}"
        if operator == "*":
            summands[-1] *= number
        else:
            summands.append(number if operator == "+" else -number)
    return {"prompt": f"{question}=", "answer": str(sum(summands))}


def reverse(rng: Random, options: ReverseOptions) -> Row:
    """Returns a row such as {"prompt": "reverse: abcd", "answer": "dcba"}."""
    text = word(rng, options)
    return {"prompt": f"reverse: {text}", "answer": text[::-1]}


def sort(rng: Random, options: SortOptions) -> Row:
    """Returns a row such as {"prompt": "sort: 5291", "answer": "1259"}; characters are sorted by code point."""
    text = word(rng, options)
    return {"prompt": f"sort: {text}", "answer": "".join(sorted(text))}


def word(rng: Random, options: ReverseOptions | SortOptions) -> str:
    """Returns a random word. Each length is equally likely, although there are fewer short words."""
    return "".join(rng.choices(options.alphabet, k=rng.randint(options.min_length, options.max_length)))


def countdown(rng: Random, options: CountdownOptions) -> Row:
    """Returns a row such as {"prompt": ..., "answer": "(25-3)*2", "numbers": [3, 25, 2], "target": 44}.

    The answer is one of perhaps many. The target comes from an expression that uses every number once, so + - * suffice to reach
    it. It lies between 1 and `numbers` times `largest`.
    """
    numbers = [rng.randint(1, options.largest) for _ in range(options.numbers)]
    target, answer = 0, ""
    while not 1 <= target <= options.numbers * options.largest:
        target, answer = expression(rng, numbers)
    listed = ", ".join(map(str, numbers))
    prompt = f"Use each of the numbers {listed} exactly once with + - * and parentheses to make {target}."
    return {"prompt": prompt, "answer": answer, "numbers": numbers, "target": target}


def expression(rng: Random, numbers: list[int]) -> tuple[int, str]:
    """Returns the value and text of an expression, (44, "(25-3)*2"): random parts are joined by twos, and none is negative."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        (a, a_text), (b, b_text) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        if a < b:
            a, a_text, b, b_text = b, b_text, a, a_text
        operator = rng.choice("+-*")
        value = a + b if operator == "+" else a - b if operator == "-" else a * b
        parts.append((value, f"({a_text}{operator}{b_text})"))
    value, text = parts[0]
    return value, text[1:-1] if len(numbers) > 1 else text


def colours(rng: Random, options: ColoursOptions) -> Row:
    """Returns a row such as {"prompt": "Which colour is on the left?", "answer": "red", "images": ["data:image/..."]}.

    The picture has a left and a right half, with noise. A row without a picture names the colours in its prompt.
    """
    if rng.random() < options.texts:
        named, place = rng.sample(sorted(COLOURS), 4), rng.randrange(4)
        question = f"Which colour is the {('first', 'second', 'third', 'last')[place]}?"
        return {"prompt": f"{', '.join(named)}. {question}", "answer": named[place], "images": []}
    halves, place = rng.sample(sorted(COLOURS), 2), rng.randrange(2)
    question = f"Which colour is on the {('left', 'right')[place]}?"
    side, row = options.side, bytearray()
    for _ in range(side):
        for x in range(side):
            row += bytes(max(0, min(255, part + rng.randint(-10, 10))) for part in COLOURS[halves[2 * x >= side]])
    picture = base64.b64encode(b"P6 %d %d 255\n" % (side, side) + row).decode()
    return {"prompt": question, "answer": halves[place], "images": [f"data:image/x-portable-pixmap;base64,{picture}"]}


def word_problems(rng: Random, options: WordProblemsOptions) -> Row:
    """Returns a row such as {"prompt": "Ben has 7 cups and buys 5 more. ... Reply with the number only.", "answer": "12"}.

    The numbers that an answer is made of lie between 2 and `largest`; no answer is negative.
    """
    text, answer = rng.choice(TWO_STEPS if rng.random() < options.two_steps else ONE_STEP)
    a, b, c = (rng.randint(2, options.largest) for _ in range(3))
    numbers = {"a": a, "b": b, "c": c, "few": min(a, b), "many": max(a, b), "sum": a + b, "all": a + b + c}
    numbers |= {"product": a * b, "product_and_c": a * b + c}
    said = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **numbers)
    return {"prompt": f"{said} Reply with the number only.", "answer": str(numbers[answer])}


def gym(options: GymOptions, seed: int) -> list[Row]:
    """Returns rows of a data set of reasoning-gym, with its facts for the scorer in the column `metadata`, as JSON text.

    Raises DataError if it refuses its settings, and SetupError if the package is not installed.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise SetupError(f"data.source: task:gym needs reasoning-gym: pip install 'rlgen[gym]' ({error})") from error
    if options.dataset not in DATASETS:
        close = get_close_matches(options.dataset, DATASETS, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(sorted(DATASETS))}"
        raise DataError(f"data.options.dataset: reasoning-gym has no data set `{options.dataset}`; {hint}")
    try:
        made = create_dataset(options.dataset, size=options.size, seed=seed, **options.config)
        rows = [
            {"prompt": row["question"], "answer": row["answer"], "metadata": json.dumps(row["metadata"], default=str)}
            for row in made
        ]
    except (TypeError, ValueError, AssertionError) as error:  # how its data sets refuse settings
        raise DataError(
            f"data.options.config: reasoning-gym's {options.dataset} refuses it: {error}; correct or remove it"
        ) from error
    answer, metadata = rows[0]["answer"], json.loads(rows[0]["metadata"])
    if answer is not None and made.score_answer(answer, {"answer": answer, "metadata": metadata}) < 1:
        raise DataError(
            f"data.options.dataset: {options.dataset} cannot be used: its scorer compares values that JSON cannot hold;"
            " take another"
        )
    return rows


TASKS: dict[str, Callable[[Random, Any], Row]] = {
    "arithmetic": arithmetic,
    "reverse": reverse,
    "sort": sort,
    "countdown": countdown,
    "colours": colours,
    "word_problems": word_problems,
}
