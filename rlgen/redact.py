"""What must not be shown: secrets in any text that leaves the process, and control characters on a terminal.

Every message of an `RlgenError`, every line of a log, every traceback and the record of the command line go through `redacted`.
What a model wrote is kept as it is in `rollouts/`; on its way to a terminal it goes through `printable`.
"""

import os
import re
from collections.abc import Sequence

REDACTED = "[redacted]"
SHORTEST = 6  # characters of a secret in the environment; shorter values are words like "true"
CERTAIN = 12  # characters of one that no recipe has by accident

# Names whose value is a secret: of environment variables, of keys in a recipe. `eos_token` and `max_tokens` are none.
SECRET_NAME = re.compile(
    r"""(?ix) (^|.*[_.-]) (api[_-]?key | (access|private|secret|encryption|signing)[_-]?key (_?id)? | secret | password | passwd
    | passphrase | authorization | credentials? ) $
    | (^|.*[_.-]) (hf|hub|auth|access|api|bearer|server|session|refresh|secret|github|gh|gitlab|wandb|openai|judge)
      [_-]?token $ | ^token $"""
)
SECRET_VARIABLE = re.compile(r"(?i).*(token|secret|password|passwd|passphrase|(api|access|private|secret)_?key|authorization)")
# `api_key: "abc"`, `password=abc`, `token=abcdefgh`; "stop token: 7" is none.
NAMED = re.compile(
    r"""(?ix) ( (?: api[_-]?key | (?:access|private|secret|encryption|signing)[_-]?key | secret | password | passwd | passphrase)
    \\?["']? \s{0,3} [:=] \s{0,3} \\?["']? ) [^\s"',;}&\\]+"""
)
NAMED_TOKEN = re.compile(
    r"""(?ix) ( (?<![a-z_]) (?:(?:hf|hub|auth|access|api|bearer|server|session|refresh|rlgen_server)[_-])? token
    \\?["']? \s{0,3} [:=] \s{0,3} \\?["']? ) [^\s"',;}&\\]{8,}"""
)
HEADER = re.compile(
    r"""(?ix) ( authorization \\?["']? \s{0,3} [:=] \s{0,3} \\?["']? (?:(?:bearer|basic|token)\s{1,3})? ) [^\s"',;}\\]+
    | ( \bbearer\s{1,3} ) (?: [\w.~+/=-]{20,} | (?=[\w.~+/=-]{0,40}[\d.~+/=]) [\w.~+/=-]{8,} )"""
)
KNOWN_FORMS = re.compile(
    r"""(?x) (?<![A-Za-z0-9]) (?: hf_[A-Za-z0-9]{16,} | sk-[A-Za-z0-9_-]{16,} | gh[pousr]_[A-Za-z0-9]{20,}
    | github_pat_\w{20,} | glpat-[\w-]{16,} | xox[abprs]-[\w-]{10,} | AKIA[0-9A-Z]{16}
    | (?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,} )"""
)
IN_URL = re.compile(r"""(?<=://)[^\s/@"'<>]{1,500}@""")

# C0 and C1 controls but line end and tab, marks that end lines or turn the direction of text, and halves of characters.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redacted(text: str) -> str:
    """The text without secrets: values of environment variables with a secret's name, and what has the form of one."""
    for value in secrets_of_environment():
        text = text.replace(value, REDACTED)
    text = KNOWN_FORMS.sub(REDACTED, text)
    text = IN_URL.sub(f"{REDACTED}@", text)
    text = HEADER.sub(lambda match: (match[1] or match[2]) + REDACTED, text)
    return NAMED_TOKEN.sub(rf"\1{REDACTED}", NAMED.sub(rf"\1{REDACTED}", text))


def secrets_of_environment(shortest: int = SHORTEST) -> list[str]:
    """The longest first: one may be part of another. Of those of several lines each line too: they are printed line by line."""
    values = [value for name, value in os.environ.items() if len(value) >= shortest and SECRET_VARIABLE.fullmatch(name)]
    lines = {line for value in values for line in map(str.strip, value.splitlines()) if len(line) >= CERTAIN}
    return sorted({*values, *lines}, key=len, reverse=True)


def holds_secret(text: str, known: Sequence[str]) -> bool:
    """Whether a text holds a secret beyond doubt: one of those that are known, or of a known form. Names are not looked at."""
    return any(form.search(text) for form in (KNOWN_FORMS, IN_URL, HEADER)) or any(value in text for value in known)


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of that name holds a secret: `api_key`, `HF_TOKEN`; not `eos_token`, `token_env`."""
    return SECRET_NAME.match(name) is not None


def printable(text: str) -> str:
    r"""The text as a terminal may show it: control characters, ANSI escapes and marks of direction become `\x1b`, `\u202e`."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def printable_json(text: str) -> str:
    """JSON that means the same, with every such character as JSON's own escape: one line stays one line, in any file."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
