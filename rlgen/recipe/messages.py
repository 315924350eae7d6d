"""Says in plain words what is wrong with a value or a key of a recipe, and what to write instead."""

import re
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rlgen.errors import Problem
from rlgen.recipe import yaml
from rlgen.recipe.engines import ColocatedEngineRecipe
from rlgen.recipe.hints import EXAMPLES, INSTEAD, MAIN_KEYS, VALUES, by_word
from rlgen.recipe.keys import advice, models_of
from rlgen.recipe.models import Recipe
from rlgen.recipe.trainers import GRPORecipe

# The variant of a section when a recipe names no kind.
UNIONS: dict[str, type[BaseModel]] = {"engine": ColocatedEngineRecipe, "trainer": GRPORecipe}
# Sections with a `kind`, and where pydantic inserts it into the path of an error.
TAGS = {"engine": 1, "trainer": 1, "sinks": 2}
UNTAGGED = ("union_tag_invalid", "union_tag_not_found")  # errors of the `kind` itself
MAPPING_EXPECTED = ("dict_type", "model_type", "model_attributes_type")
PLAIN_WORDS = by_word(
    {
        "must be a whole number": "int_type int_from_float",
        "must be a number": "float_type",
        "must be true or false": "bool_type",
        "must be text": "string_type",
        "must be a finite number": "finite_number",
        "must be a list": "list_type tuple_type",
        "must be a mapping of keys to values": " ".join(MAPPING_EXPECTED),
    }
)

PATTERNS = {  # what a text must be, where pydantic shows a regular expression
    "run.name": "letters, digits, `.`, `_` and `-`, and begin with a letter or a digit; run.dir is the folder that holds runs",
    "rewards.*.name": "letters, digits, `.`, `_` and `-`",
    "rewards.*.args.device": "cpu, cuda or cuda:N",
    "tools.*.name": "letters, digits, `_` and `-`, and begin with a letter",
    "engine.token_env": "the name of an environment variable: letters, digits and `_`",
    "engine.devices": 'numbers of GPUs, such as "1" or [4, 5]',
}

NULL = "a key without a value is null: give it one, or remove it"
SHARES = {"rollout.top_p", "eval.top_p", "rollout.min_p", "trainer.clip_low", "trainer.top_entropy"} | {
    "engine.gpu_memory_utilization"
}
YES_OR_NO = {"yes": True, "on": True, "1": True, "true": True, "no": False, "off": False, "0": False, "false": False}


def translate(details: ErrorDetails, data: dict[str, Any], where: yaml.Where, model: type[BaseModel] | None = None) -> Problem:
    """Returns one pydantic error as a problem in plain words, with its position in the file."""
    loc = plain(details)
    name, kind, value = ".".join(map(str, loc)), details["type"], details["input"]
    if kind == "extra_forbidden":
        return Problem(where(loc), *_unknown_key(loc, data, model))
    if kind in UNTAGGED:
        name = f"{name}.kind"
    general = _general(name)
    example = EXAMPLES.get(general) and f"such as `{EXAMPLES[general]}`"
    if kind in ("missing", "union_tag_not_found"):
        return Problem(where(loc), f"`{name}` is missing", example)
    if kind in ("literal_error", "union_tag_invalid"):
        expected = details.get("ctx", {}).get("expected" if kind == "literal_error" else "expected_tags", "")
        options = re.findall(r"'([^']*)'", expected)
        if kind == "union_tag_invalid":
            loc, value = (*loc, "kind"), kind_at(loc, data)
        said = str(value).lower()
        hint = NULL if value is None else suggest(said, [said], None) if said in options else VALUES.get((name, said))
        hint = hint or suggest(str(value), options, None)
        return Problem(where(loc), f"{name}: {quoted(value)} is not one of {', '.join(options)}", hint)
    if kind == "too_short" and isinstance(value, list | dict):
        return Problem(where(loc), f"{name}: is empty", example)
    if kind == "string_pattern_mismatch" and general in PATTERNS:
        return Problem(where(loc), f"{name}: {quoted(value)} must be {PATTERNS[general]}")
    what = details["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
    what = PLAIN_WORDS.get(kind, what)
    if kind == "string_type" and general not in INSTEAD:
        what = "must be text; put quotes around it"
    return Problem(where(loc), f"{name}: {what}, not {quoted(value)}", _instead(general, kind, value))


def _unknown_key(loc: yaml.Path, data: dict[str, Any], model: type[BaseModel] | None) -> tuple[str, str | None]:
    """Returns what is wrong with the key at `loc` and what to do. `model`: of its section; None: that which `data` names."""
    name = ".".join(map(str, loc))
    kind = str(kind_at(loc, data) or "")
    section, dot, key = str(loc[-1]).rpartition(".")
    dotted = f"write `{section}: {{{key}: ...}}`: dotted keys are for --set" if dot and section else None
    hint = dotted or advice(name, _general(name), kind, list((model or _model_at(loc[:-1], data)).model_fields))
    owner = yaml.cut_short(".".join(map(str, loc[:-1])))
    of = (f"`{owner}`" if owner else "a recipe") + (f" (kind: {kind})" if kind else "")
    return f"`{yaml.cut_short(str(loc[-1]))}` is not a key of {of}", hint


def _instead(general: str, kind: str, value: Any) -> str | None:
    """Returns what to write instead of a value of a wrong type: `engine: vllm` -> "write `engine: {kind: colocated}`, ..."."""
    if value is None:
        return f"give it a value, such as `{EXAMPLES[general]}`" if general in EXAMPLES else NULL
    if kind in MAPPING_EXPECTED:
        if isinstance(value, list):
            one = value[0] if len(value) == 1 and isinstance(value[0], str) and general in MAIN_KEYS else None
            return _as_mapping(general, one) if one else "write keys and values, without `-` and brackets"
        known = general in MAIN_KEYS or general.startswith("health.")
        return _as_mapping(general, value) if known and isinstance(value, str | int | float) else None
    if kind == "list_type" and f"{general}.*" in MAIN_KEYS:
        if str(value).lower() in ("none", "false"):
            return "leave it out"
        shown = _as_items(MAIN_KEYS[f"{general}.*"], value)
        return yaml.cut_short(f"write `{general}: [{', '.join(shown)}]`", 200) if shown else None
    if kind == "bool_type" and isinstance(value, str) and value.lower() in YES_OR_NO:
        return f"write {'true' if YES_OR_NO[value.lower()] else 'false'}"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind in ("less_than", "less_than_equal") and general in SHARES and value <= 100:
        return f"it is a share: write {value / 100:g}"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return _number(value, kind == "float_type") or INSTEAD.get(general)
    return None if kind == "value_error" else INSTEAD.get(general)


def _number(text: str, share: bool) -> str | None:
    """Returns how a text is written that must have meant a number: "1_000" -> "write 1000, ...". `share`: fractions too."""
    if text.lower() == "none":
        return "leave it out, or write null"
    thousands = re.fullmatch(r"\d{1,3}([,_]\d{3})+", text.strip())
    number = yaml.scalar(re.sub("[,_]", "", text).strip() if thousands else text.replace("_", "").replace(",", ".").strip())
    if isinstance(number, int | float) and not isinstance(number, bool):
        return f"write {number}, without quotes"
    with_unit = re.fullmatch(r"([0-9.]+)\s*(%|[A-Za-z]+)", text.strip())
    if with_unit is None or not isinstance(number := yaml.scalar(with_unit[1]), int | float):
        return None
    factor = {"k": 1e3, "m": 1e6, "%": 0.01 if share else 0}.get(with_unit[2].lower(), 1)
    return f"write {number * factor:.10g}, without a unit" if factor else "write a count"


def _as_mapping(general: str, value: Any) -> str:
    """Returns how a plain value is written where a mapping is expected, and what is known about the value."""
    main, section = MAIN_KEYS.get(general, "threshold"), general.rpartition(".")[2]  # the others are health rules
    if general == "trainer.correction" and not isinstance(value, str):
        main = "max"
    known = VALUES.get((f"{general}.{main}", str(value).lower())) or VALUES.get((general, str(value).lower()))
    start = "" if section == "*" else f"{section}: "
    if isinstance(value, str) and (pair := re.fullmatch(r"(\w+)\s*=\s*(\S+)", value)):
        return f"write `{start}{{{pair[1]}: {pair[2]}}}`"
    if str(value).lower() in ("none", "off", "no"):
        value = False
    if known and known.startswith("write"):
        return known
    if value is True:
        return f"write `{start}{{}}` for its defaults"
    if value is False:
        return "leave it out"
    if known:
        first = {"trainer": "grpo", "engine": "colocated"}.get(general)
        return f"write `{start}{{{main}: {first}}}`: {known}" if first else known
    return f"write `{start}{{{main}: {yaml.cut_short(str(value))}}}`"


def _as_items(main: str, value: Any) -> list[str]:
    """Returns the items of a list as they are written, for what stands in its place: "wandb" -> ["{kind: wandb}"]."""
    if isinstance(value, str):
        return [f"{{{main}: {value}}}"]
    if not isinstance(value, dict):
        return []
    if main in value:
        return ["{" + _flow(value) + "}"]
    items = {key: inner if isinstance(inner, dict) else {"weight": inner} for key, inner in value.items()}
    return ["{" + _flow({main: key, **inner}) + "}" for key, inner in items.items()]


def _flow(mapping: dict[str, Any]) -> str:
    """Returns the keys and values of a mapping as they stand within braces."""
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def _general(name: str) -> str:
    """Returns a dotted path with `*` for each index of a list."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plain(details: ErrorDetails) -> yaml.Path:
    """Returns the path of a pydantic error, without the union tag that pydantic inserts."""
    loc = tuple(details["loc"])
    tag = TAGS.get(str(loc[0]))
    return loc if tag is None or len(loc) <= tag or details["type"] in UNTAGGED else (*loc[:tag], *loc[tag + 1 :])


def kind_at(loc: yaml.Path, data: dict[str, Any]) -> Any:
    """Returns the `kind` of the section in which `loc` is, as `data` names it; None if it has no kinds, or names none."""
    if str(loc[0]) not in TAGS:
        return None
    section: Any = data
    for part in loc[: TAGS[str(loc[0])]]:
        section = section[part]
    return section.get("kind") if isinstance(section, dict) else None


def _model_at(loc: tuple[str | int, ...], data: dict[str, Any]) -> type[BaseModel]:
    """Returns the model class whose keys are at `loc`, by the `kind` that `data` names."""
    model: type[BaseModel] = Recipe
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        variants = models_of(model.model_fields[part].annotation)
        kind = kind_at(loc, data) if index == 0 else None
        named = [v for v in variants if kind and kind in get_args(v.model_fields["kind"].annotation)]
        model = (named or variants)[0]
    return model


def suggest(word: str, known: list[str], what: str | None) -> str | None:
    """Returns a hint: the closest known word, or, if none is close and `what` is given, all known words."""
    close = get_close_matches(word[:100], known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"{what} are {', '.join(known)}" if what else None


def quoted(value: Any) -> str:
    """Returns the repr of a value, shortened for a message."""
    return yaml.cut_short(repr(value))
