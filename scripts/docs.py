"""`make docs`: writes the tables that follow from code into README.md and `rlgen/docs/*.md`, between their markers.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`, or `code FILE NAME`: the lines of
a function of `rlgen/`, without its docstring. With `--check` nothing is written, and the exit code is 1 if a file would change.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from gpu_rows.record import short as number
from pydantic import BaseModel

from rlgen import errors
from rlgen.cli.app import app
from rlgen.errors import Fault, RlgenError
from rlgen.metrics import Family, Metric
from rlgen.recipe.data import TASKS
from rlgen.recipe.health import HealthRecipe, HealthRule
from rlgen.recipe.judges import MODEL_REWARDS
from rlgen.recipe.keys import models_of
from rlgen.recipe.models import Recipe
from rlgen.recipe.trainers import Preset, TrainerRecipe
from rlgen.recipe.trl import OPTIONS
from rlgen.rewards.builtin import BUILTIN
from rlgen.rewards.resolve import SAMPLE_NAMES

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "rlgen" / "docs"
FILES = [ROOT / "README.md", *sorted(PAGES.glob("*.md"))]
MEASURED = ROOT / "scripts" / "gpu_measured"  # what `make gpu-check` found, one file a device
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+|code \S+ \S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SAID = 240  # characters of an error message in a table
# What a recipe file may leave out, though the models require it, and what is then taken.
FILLED = {"RunRecipe": "the file's name", "HealthRule": "that of RULE"}
# These read metrics; every other file that names one writes it.
READERS = ("metrics.py", "run/health.py", "run/console.py", "run/live.py", "run/sinks/", "setup/", "analysis/", "cli/")

Schema = Mapping[str, Any]
Labelled = Sequence[tuple[str, type[BaseModel]]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, each row of which is one line."""
    lines = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# --- the recipe ------------------------------------------------------------------------------------------------------


def sections(path: str, models: Labelled) -> Iterator[tuple[str, Labelled]]:
    """(path, models) of a section and of the mappings in it. Several models: the label says which `kind` each belongs to."""
    yield path, models
    below: dict[str, dict[type[BaseModel], str]] = {}
    for label, model in models:
        for key, field in model.model_fields.items():
            for found in models_of(field.annotation):
                owners = below.setdefault("RULE" if found is HealthRule else key, {})
                owners[found] = f"{owners[found]}, {label}" if found in owners and label not in owners[found] else label
    for key, owners in below.items():
        yield from sections(f"{path}.{key}", [(label, found) for found, label in owners.items()])


def recipe_fields() -> str:
    """Every section with its sentence and its keys. Keys that stood in an earlier section are named there alone."""
    text = []
    stood: dict[tuple[type[BaseModel], ...], str] = {}
    for name, field in Recipe.model_fields.items():
        models = models_of(field.annotation)
        kinds = [get_args(m.model_fields["kind"].annotation)[0] if "kind" in m.model_fields else "" for m in models]
        for path, labelled in sections(name, list(zip(kinds, models, strict=True))):
            first = stood.setdefault(tuple(model for _, model in labelled), path)
            said = f"{field.description}\n\n" if path == name else ""
            keys = of_section(labelled) if first == path else f"It has the keys of `{first}`.\n"
            text.append(f"### {path}\n\n{said}{keys}")
            if path == "data":
                text.append(f"### data.options\n\nThe column `of` names the task.\n\n{of_section(list(TASKS.items()))}")
    return "\n".join(text)


def of_section(models: Labelled) -> str:
    """The keys of a section; where it has several kinds, with those that have the key."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for label, model in models:
        for key, schema in model.model_json_schema()["properties"].items():
            if key != "kind":
                default = as_yaml(schema["default"]) if "default" in schema else FILLED.get(model.__name__, "required")
                row = (f"`{key}`", default, values(schema), " ".join(schema.get("description", "").split()))
                rows.setdefault(row, []).append(label)
    head = ["key", "default", "values", "what it does"]
    body: list[Sequence[str]] = list(rows)
    if len(models) > 1:
        head = ["key", "of", *head[1:]]
        body = [(row[0], "all" if len(labels) == len(models) else ", ".join(labels), *row[1:]) for row, labels in rows.items()]
    return "".join([kinds_of(models), table(head, body), *presets(models)])


def kinds_of(models: Labelled) -> str:
    """The kinds of a section with their sentences; empty for a section without kinds."""
    fields = [model.model_fields["kind"] for _, model in models if "kind" in model.model_fields]
    names = ", ".join(kind for field in fields for kind in get_args(field.annotation))
    taken = "".join(f" (default: {field.default})" for field in fields if not field.is_required())
    said = " ".join(" ".join((field.description or "").split()) for field in fields)
    return f"`kind`: {names}{taken}. {said}\n\n" if fields else ""


def presets(models: Labelled) -> Iterator[str]:
    """The defaults that depend on another key."""
    for _, model in models:
        if issubclass(model, Preset) and set(model.presets) <= set(get_args(model.model_fields[model.choice].annotation)):
            rows = [
                (f"`{value}`", ", ".join(f"{k}: {as_yaml(v)}" for k, v in said.items())) for value, said in model.presets.items()
            ]
            yield f"\nDefaults that follow from `{model.choice}`:\n\n" + table([model.choice, "defaults"], rows)


def as_yaml(value: Any) -> str:
    """A default as a recipe would say it. {"a": 1, "b": None} -> `{a: 1}`"""
    if isinstance(value, dict):
        said = ", ".join(f"{key}: {as_yaml(one)}" for key, one in value.items() if one is not None)
        return f"{{{said}}}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def values(schema: Schema) -> str:
    """The values that a key takes, in words."""
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(values(one) for one in schema.get("anyOf", schema.get("oneOf", [])) if one.get("type") != "null")
    if "$ref" in schema:
        return "mapping"
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {values(schema.get('items') or {})}" if schema.get("items") else "list of two numbers"
    words = {"boolean": "true or false", "string": "text", "object": "mapping"}
    kind = str(schema.get("type", "any"))
    return words.get(kind, kind) + bounds(schema)


def bounds(schema: Schema) -> str:
    """`, 1 or more, below 1000`"""
    words = {"minimum": "{} or more", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}"}
    return "".join(f", {form.format(short(schema[key]))}" for key, form in words.items() if key in schema)


def short(number: float) -> str:
    """1000000000 -> `1e9`"""
    if number == int(number) and abs(number) >= 10**6 and len(str(int(abs(number))).strip("0")) == 1:
        return f"{number:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{number:g}" if isinstance(number, float) else str(number)


def choices() -> str:
    """Every key of `trainer` that takes one of several names, with the kinds that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for trainer in models_of(TrainerRecipe):
        kind = get_args(trainer.model_fields["kind"].annotation)[0]
        for path, labelled in sections("trainer", [(kind, trainer)]):
            for key, field in labelled[0][1].model_fields.items():
                if key != "kind" and get_origin(field.annotation) is Literal:
                    names = " ".join(f"`{name}`" for name in get_args(field.annotation))
                    rows.setdefault((f"`{path}.{key}`", names), []).append(kind)
    return table(["key", "of", "choices"], [(key, ", ".join(kinds), names) for (key, names), kinds in rows.items()])


def health_rules() -> str:
    """Every rule with its default."""
    rows = [
        (f"`{name}`", f"{field.default.threshold:g}", str(field.default.steps), str(field.description))
        for name, field in HealthRecipe.model_fields.items()
        if isinstance(field.default, HealthRule)
    ]
    return table(["rule", "threshold", "steps", "broken when"], rows)


# --- rewards ---------------------------------------------------------------------------------------------------------


def built_in_rewards() -> str:
    """Every built-in reward with what it returns, and its `args` with their defaults and what its docstring says of them."""
    rows = []
    for name, function in BUILTIN.items():
        text = inspect.getdoc(function) or ""
        said = dict(re.findall(r"^    (\w+): (.+)$", text, re.MULTILINE))
        parameters = inspect.signature(function).parameters.values()
        args = [
            f"`{one.name}` ({'required' if one.default is one.empty else as_yaml(one.default)}): {said[one.name].rstrip('.')}"
            for one in parameters
            if one.name not in SAMPLE_NAMES | {"answer", "messages"}
        ]
        what = " ".join(text.split("\n\n")[0].split()).removeprefix("Returns ").rstrip(".")
        rows.append((f"`{name}`", what, "; ".join(args).rstrip(".")))
    return table(["`use`", "returns", "`args`"], rows)


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """("recipes copy", its command), ..."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
        for part in below or ():
            yield from walk(f"{name} {part}".strip(), below[part])

    yield from walk("", typer.main.get_command(app))


def usage(name: str, command: Any) -> str:
    """`rlgen recipes copy NAME [PATH]`; of an argument that takes several values `RUN...`"""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = {p: f"{(p.metavar or p.name.upper()).strip('[]')}{'...' if p.nargs == -1 else ''}" for p in arguments}
    words = [word if p.required else f"[{word}]" for p, word in shown.items()]
    return " ".join(["rlgen", name, *words])


def command_table() -> str:
    """Every command with the first sentence of its help; the commands of a group stand in one row."""
    rows = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        below = ", ".join(getattr(command, "commands", ()))
        said = f"{name} {below}" if below else usage(name, command).removeprefix("rlgen ")
        rows.append((f"`{said}`", first_sentence(command.help)))
    return table(["rlgen", ""], rows)


def command_pages() -> str:
    """Every command with its arguments and options."""
    text = []
    for name, command in commands():
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            shown = (parameter.metavar or parameter.name.upper()).strip("[]")
            if parameter.param_type_name == "option":
                shown = f"{parameter.opts[0]}{'' if parameter.is_flag else f' {parameter.metavar or parameter.name.upper()}'}"
            rows.append((f"`{shown}`", parameter.help or ""))
        text.append(f"### {usage(name, command)}\n\n{' '.join(command.help.split())}\n\n{table(['', ''], rows) if rows else ''}")
    return "\n".join(text)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".;")


# --- TRL -------------------------------------------------------------------------------------------------------------


def trl_options() -> str:
    """Every option of TRL by what becomes of it."""
    heads = {"renamed": "here", "derived": "follows from", "not needed": "because", "not supported": "instead"}
    text = []
    for verdict, head in heads.items():
        rows = [(f"`{option.name}`", option.said) for option in OPTIONS.values() if option.verdict == verdict]
        text.append(f"### {verdict.capitalize()}\n\n{table(['option of TRL', head], rows)}")
    return "\n".join(text)


# --- metrics, errors, faults -----------------------------------------------------------------------------------------


def metric_glossary() -> str:
    """Every metric by what stands before its `/`, with the files that write it."""
    groups: dict[str, list[Metric | Family]] = {}
    for entry in [*Metric, *Family]:
        groups.setdefault(entry.partition("/")[0] + "/" if "/" in entry else "without a prefix", []).append(entry)
    text = []
    for group, entries in groups.items():
        rows = [
            (
                f"`{one}`",
                one.unit,
                one.what + (f" Only with {one.when}." if one.when else ""),
                ", ".join(f"`{p}`" for p in writers(one)),
            )
            for one in entries
        ]
        text.append(f"### {group}\n\n{table(['metric', 'unit', 'what it is', 'written by'], rows)}")
    return "\n".join(text)


def writers(entry: Metric | Family) -> list[str]:
    """The files of `rlgen/` that write a metric."""
    name = f"{type(entry).__name__}.{entry.name}"
    own = {"Family.HEALTH"}  # `run/health.py` reads all others and writes this one
    readers = ("metrics.py", "run/live.py") if name in own else READERS
    return [file for file, names in metrics_named().items() if not file.startswith(readers) and name in names]


@cache
def metrics_named() -> dict[str, set[str]]:
    """For each file of `rlgen/` the metrics that it names: {"run/records.py": {"Metric.LOSS", ...}}"""
    package = ROOT / "rlgen"
    named = re.compile(r"\b(?:Metric|Family)\.\w+")
    return {str(path.relative_to(package)): set(named.findall(path.read_text())) for path in sorted(package.rglob("*.py"))}


def exit_codes() -> str:
    """Every exit code with the errors that lead to it."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RlgenError)]
    rows = [("0", "", "The command did what it was asked.")]
    for code in sorted({kind.exit_code for kind in kinds if kind is not RlgenError}):
        own = [kind for kind in kinds if kind.exit_code == code]
        rows += [(str(code), f"`{kind.__name__}`", " ".join((kind.__doc__ or "").split("\n\n")[0].split())) for kind in own]
    rows.append((str(RlgenError.exit_code), "", "A bug in rlgen: any other exception. Its traceback is printed."))
    rows.append(("130", "", "Stopped at once: by a second Ctrl-C, or by any Ctrl-C outside training."))
    return table(["code", "error", "what it means"], sorted(rows, key=lambda row: int(row[0])))


def sentinel_faults() -> str:
    return table(["fault", "what is wrong"], [(f"`{fault}`", fault.what) for fault in Fault])


def faults() -> str:
    """Every fault of `tests/faults/cases.py`."""
    sys.path.append(str(ROOT / "tests"))
    from faults.cases import ABSENT, CASES, GPU, PARTLY

    def state(number: int) -> str:
        if number in ABSENT:
            return f"no: {ABSENT[number]}"
        if number in GPU:
            return "no: it needs a GPU"
        return f"yes, except with {PARTLY[number]}" if number in PARTLY else "yes"

    return table(["#", "fault", "produced by `make faults`"], [(str(n), title, state(n)) for n, title in CASES.items()])


# --- tests ----------------------------------------------------------------------------------------------------------


def ways() -> str:
    """Every two values of the axes of training with the tests of `make test` that train so, and these tests."""
    sys.path.append(str(ROOT / "tests"))
    from helpers.paths import AXES, declared

    tests = list(declared(ROOT / "tests"))
    values = [value for axis in AXES.values() for value in axis]

    def cell(one: str, other: str) -> str:
        if any({one, other} <= set(axis) for axis in AXES.values()):
            return ""
        numbers = [str(number) for number, (way, _) in enumerate(tests, 1) if {one, other} <= set(way)]
        return " ".join(numbers) or "none"

    rows = [
        (value, *(cell(value, other) for other in values[: -len(AXES["trained"])])) for value in values[len(AXES["trainer"]) :]
    ]
    named = [(str(number), *way, f"`tests/{test}`") for number, (way, test) in enumerate(tests, 1)]
    return "\n".join([table(["", *values[: -len(AXES["trained"])]], rows), table(["#", *AXES, "test"], named)])


# --- architectures ---------------------------------------------------------------------------------------------------


def sweep() -> str:
    """What `make sweep` found: how many by outcome, the gaps of the model types that are served, what is said of the others."""
    results: dict[str, dict[str, dict[str, Any]]] = json.loads((ROOT / "scripts" / "sweep.json").read_text())
    engines = {"transformers": "transformers engine", "colocated": "vLLM on the CPU"}
    outcomes = ("healthy", "refused", "not built", "defect")
    found = {(name, engine): one for name, both in results.items() for engine, one in both.items()}
    counts = [
        (outcome, *(str(sum(one["outcome"] == outcome for (_, of), one in found.items() if of == engine)) for engine in engines))
        for outcome in outcomes
    ]

    def gap(name: str, engine: str) -> str:
        one = found.get((name, engine), {"outcome": "–"})
        return f"{one['gap']:.1e}" if one["outcome"] == "healthy" else str(one["outcome"])

    served = [name for name, both in results.items() if any(one["outcome"] == "healthy" for one in both.values())]
    rows = [(f"`{name}`", *(gap(name, engine) for engine in engines)) for name in served]
    told: dict[tuple[str, str, str], list[str]] = {}
    for (name, engine), one in found.items():
        if one["outcome"] != "healthy":
            said = one["said"] if len(one["said"]) <= SAID else one["said"][:SAID].rsplit(" ", 1)[0] + " …"
            told.setdefault((engines[engine], str(one.get("exit", one["outcome"])), said), []).append(f"`{name}`")
    others = [(", ".join(names), *key) for key, names in sorted(told.items())]
    return "\n".join(
        [
            table(["outcome", *engines.values()], counts),
            table(["served: model type, or a form of it", *(f"max abs(Δ), {engine}" for engine in engines.values())], rows),
            table(["model types", "engine", "exit", "what is said"], others),
        ]
    )


# --- GPUs ------------------------------------------------------------------------------------------------------------


def gpu() -> str:
    """What `make gpu-check` found on each device, or that none has been measured. Raises ValueError for a kept rehearsal."""
    files = sorted(MEASURED.glob("*.json"))
    if not files:
        return "No GPU has been measured yet.\n"
    text = []
    for path in files:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["rehearsal"]:
            raise ValueError(f"{path} is of a rehearsal on the CPU, which says nothing about a GPU: delete it")
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        rows = [line for row in found["rows"] for line in gpu_lines(row)]
        head = f"### {found['device']}, {found['date']}\n\nCommit {found['commit'] or 'unknown'}; {versions}.\n"
        text.append(f"{head}\n{table(['row', 'seconds', 'what', 'value', 'bound'], rows)}")
    return "\n".join(text)


def gpu_lines(row: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """A line for each value of a row; one that failed or was left out begins with why."""
    name, seconds = f"{row['row']}", f"{row['seconds']:.0f}"
    if row["status"] != "ok" or not row["values"]:
        yield name, seconds, f"{row['status']}: {row['sentence']}", "", ""
        name = seconds = ""
    for one in row["values"]:
        mark = "" if one["holds"] else " (out of bounds)"
        yield name, seconds, one["what"], f"{number(one['value'])} {one['unit']}".rstrip(), f"{one['bound']}{mark}"
        name = seconds = ""


TABLES: dict[str, Callable[[], str]] = {
    "recipe": recipe_fields,
    "choices": choices,
    "health": health_rules,
    "rewards": built_in_rewards,
    "reward-model": lambda: of_section([("", MODEL_REWARDS["reward_model"])]),
    "judge": lambda: of_section([("", MODEL_REWARDS["judge"])]),
    "trl": trl_options,
    "commands": command_table,
    "command-pages": command_pages,
    "metrics": metric_glossary,
    "exit-codes": exit_codes,
    "sentinel-faults": sentinel_faults,
    "faults": faults,
    "ways": ways,
    "sweep": sweep,
    "gpu": gpu,
}


def code(file: str, name: str) -> str:
    """The lines of a function, `name` or `Class.name`, without its docstring."""
    text = (ROOT / "rlgen" / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(one for one in ast.walk(node) if getattr(one, "name", None) == part)
    assert isinstance(node, ast.FunctionDef)
    lines = text.splitlines()
    head, body = lines[node.lineno - 1 : node.body[0].lineno - 1], lines[node.body[0].lineno - 1 : node.end_lineno]
    if ast.get_docstring(node) is not None:
        body = lines[node.body[0].end_lineno : node.end_lineno]
    text = "\n".join([*head, *body[0 if body[0] else 1 :]])
    return f"```python\n# rlgen/{file}\n{textwrap.dedent(text)}\n```\n"


def written(text: str) -> str:
    """`text` with each table, and each function, as the code has it now."""

    def found(block: re.Match[str]) -> str:
        kind, *of = block[2].split(" ")
        return f"{block[1]}{code(*of) if of else TABLES[kind]()}{block[3]}"

    return BLOCK.sub(found, text)


def main() -> None:
    stale = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if (now := written(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(now, encoding="utf-8")
    said = "differ from the code; run `make docs`" if "--check" in sys.argv else "written"
    print(f"{', '.join(stale)}: {said}" if stale else "every table is as the code has it")
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
