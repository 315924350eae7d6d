"""Finds secrets in a recipe, which a run keeps copies of."""

from collections.abc import Mapping
from typing import Any

from rlgen.errors import Problem
from rlgen.recipe import yaml
from rlgen.redact import CERTAIN, holds_secret, is_secret_name, secrets_of_environment

INTO_ENVIRONMENT = "put it into an environment variable and read that in the code: a run keeps copies of its recipe"


def secrets_in(data: dict[str, Any], where: yaml.Where, texts: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each secret in the recipe: under a key whose name says so, in a value, or in a comment.

    Args:
        texts: the text of each file of the recipe by its name.
    """
    found: dict[str, Problem] = {}
    for leaf in secret_leaves(data):
        found[where(leaf)] = Problem(where(leaf), f"{'.'.join(map(str, leaf))} holds a secret", INTO_ENVIRONMENT)
    lines = {tuple(place.rsplit(":", 2)[:2]) for place in found}
    known = secrets_of_environment(CERTAIN)
    for file, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if holds_secret(line, known) and (file, str(number)) not in lines:
                found[f"{file}:{number}:1"] = Problem(f"{file}:{number}:1", "the line holds a secret", INTO_ENVIRONMENT)
    return list(found.values())


def secret_leaves(data: Any, above: yaml.Path = ()) -> list[yaml.Path]:
    """Returns the paths of text values that are secrets, by the name of their key or by their form."""
    found, known = [], secrets_of_environment(CERTAIN)
    for leaf in yaml.leaves(data, above):
        value: Any = data
        for part in leaf[len(above) :]:
            value = value[part]
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
        name = next((part for part in reversed(leaf) if isinstance(part, str)), "")
        if (texts and is_secret_name(name)) or any(holds_secret(text, known) for text in texts):
            found.append(leaf)
    return found
