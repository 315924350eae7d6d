"""Removes what must not be shown: secrets from any text that leaves the process, and control characters from terminal output.

Every message of an `RlgenError`, every log line, every traceback and the record of the command line go through `redacted`.
Model output is stored unchanged in `rollouts/`; before it is shown on a terminal it goes through `printable`.
"""

import os
import re
from collections.abc import Sequence

REDACTED = "[redacted]"
SHORTEST = 6  # least length of a secret in the environment; shorter values are words like "true"
CERTAIN = 12  # least length of a value that no recipe contains by accident

# Names of environment variables and recipe keys whose value is a secret. `eos_token` and `max_tokens` do not match.
SECRET_NAME = re.compile(
    r"""(?ix) (^|.*[_.-]) (api[_-]?key | (access|private|secret|encryption|signing)[_-]?key (_?id)? | secret | password | passwd
    | passphrase | authorization | credentials? ) $
    | (^|.*[_.-]) (hf|hub|auth|access|api|bearer|server|session|refresh|secret|github|gh|gitlab|wandb|openai|judge)
      [_-]?token $ | ^token $"""
)
SECRET_VARIABLE = re.compile(r"(?i).*(token|secret|password|passwd|passphrase|(api|access|private|secret)_?key|authorization)")
# Matches `api_key: "abc"`, `password=abc`, `token=abcdefgh`; not "stop token: 7".
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
KNOWN_STARTS = ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "AKIA", "eyJ")
IN_URL = re.compile(r"""(?<=://)[^\s/@"'<>]{1,500}@""")

# C0 and C1 controls except line end and tab, line separators, direction marks, and surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redacted(text: str) -> str:
    """Returns the text with secrets replaced by `REDACTED`.

    Secrets are the values of environment variables whose names mark a secret, and text that has the form of a secret.
    """
    for value in secrets_of_environment():
        text = text.replace(value, REDACTED)
    # Each pattern takes milliseconds for 64 KiB, and has a word without which it cannot match.
    if any(start in text for start in KNOWN_STARTS):
        text = KNOWN_FORMS.sub(REDACTED, text)
    if "://" in text:
        text = IN_URL.sub(f"{REDACTED}@", text)
    folded = text.casefold()
    if "authorization" in folded or "bearer" in folded:
        text = HEADER.sub(lambda match: (match[1] or match[2]) + REDACTED, text)
    if any(word in folded for word in ("key", "secret", "passw", "passphrase")):
        text = NAMED.sub(rf"\1{REDACTED}", text)
    return NAMED_TOKEN.sub(rf"\1{REDACTED}", text) if "token" in folded else text


def secrets_of_environment(shortest: int = SHORTEST) -> list[str]:
    """Returns the values of secret environment variables of at least `shortest` characters, longest first.

    Longest first, because one value may be part of another. Each long enough line of a multi-line value is included, because such
    a value is printed line by line.
    """
    values = [value for name, value in os.environ.items() if len(value) >= shortest and SECRET_VARIABLE.fullmatch(name)]
    lines = {line for value in values for line in map(str.strip, value.splitlines()) if len(line) >= CERTAIN}
    return sorted({*values, *lines}, key=len, reverse=True)


def holds_secret(text: str, known: Sequence[str]) -> bool:
    """Returns whether a text certainly contains a secret: a value of `known`, or text of a known form. Names are not examined."""
    return any(form.search(text) for form in (KNOWN_FORMS, IN_URL, HEADER)) or any(value in text for value in known)


def is_secret_name(name: str) -> bool:
    """Returns whether a key or variable of that name holds a secret: `api_key`, `HF_TOKEN`; not `eos_token`, `token_env`."""
    return SECRET_NAME.match(name) is not None


def printable(text: str) -> str:
    r"""Returns the text with control characters, ANSI escapes and direction marks escaped, such as `\x1b` and `\u202e`."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def printable_json(text: str) -> str:
    """Returns equivalent JSON with such characters as JSON escapes, so that one line stays one line in any file."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
