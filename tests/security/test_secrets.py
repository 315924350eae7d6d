"""Secrets are planted everywhere; runs succeed and fail; every file that they leave, and all they print, is searched."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import RECIPE, Proof, Run
from helpers.waiting import HANGS

from rlgen.cli.app import run_command
from rlgen.files import read_json
from rlgen.redact import is_secret_name, printable, redacted

PLANTED = {
    "HF_TOKEN": "hf_" + "Planted1" * 4,
    "RLGEN_SERVER_TOKEN": "planted-server-token-2",
    "OPENAI_API_KEY": "sk-proj-" + "Planted3" * 4,
    "WANDB_API_KEY": "planted4" * 5,
    "DB_PASSWORD": "planted-password-5",
    "DEPLOY_PRIVATE_KEY": "-----BEGIN KEY-----\nplanted-first-line-9\nplanted-second-line-9\n-----END KEY-----\n",
}
INLINE = {"url": "planted-in-url-6", "header": "planted.in.header-7", "argument": "planted-argument-8"}
ALL = [line for value in (*PLANTED.values(), *INLINE.values()) for line in value.splitlines() if "-----" not in line]

REWARD = f"""
import logging, os, warnings

def leak():
    environment = dict(os.environ)
    return (
        f"401 from https://me:{INLINE["url"]}@judge.example/v1?api_key={INLINE["argument"]} with"
        f" {{{{'Authorization': 'Bearer {INLINE["header"]}'}}}} in {{environment}}"
    )

def logs(completion):
    logging.getLogger("judge.http").error("request failed: %s", leak())
    warnings.warn(leak())
    try:
        raise ConnectionError(leak())
    except ConnectionError:
        logging.getLogger("judge.http").exception("and again")
    print(os.environ["DEPLOY_PRIVATE_KEY"])
    os.system('echo "a program: $HF_TOKEN"; echo "$DEPLOY_PRIVATE_KEY"; echo "> Authorization: Bearer {INLINE["header"]}" >&2')
    return float(len(completion) % 3)

def fails(completion):
    try:
        raise ConnectionError(leak())
    except ConnectionError as error:
        raise RuntimeError("the judge said " + leak()) from error
"""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLGEN_DEBUG", "")
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before[0]:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(before[1])
    logging.captureWarnings(False)


@pytest.fixture
def start(planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    """Runs `rlgen train` in this process: exit code and run directory."""
    (tmp_path / "judge.py").write_text(REWARD)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "engine: {kind: transformers}\n")

    def run(*arguments: str) -> tuple[int, Path]:
        directory = tmp_path / "run"
        monkeypatch.setattr(
            sys, "argv", ["rlgen", *arguments[:1], "train", str(recipe), "--run-dir", str(directory), *arguments[1:]]
        )
        return run_command(), directory

    return run


def search(folder: Path, *texts: str) -> tuple[int, list[str]]:
    """How many files and texts were searched, and what was found where."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    places = {str(path): path.read_bytes() for path in files} | {f"text {i}": text.encode() for i, text in enumerate(texts)}
    return len(places), [
        f"{secret} in {place}" for place, content in places.items() for secret in ALL if secret.encode() in content
    ]


@pytest.mark.slow
@pytest.mark.fault(87)
def test_a_run_that_succeeds_leaves_no_secret(
    start: Callable[..., tuple[int, Path]], capfd: pytest.CaptureFixture[str], proof: Proof
) -> None:
    code, run = start("--debug", "--set", "rewards.0.use=judge.py:logs")
    said = capfd.readouterr()
    log = (run / "logs" / "rewards.log").read_text()
    assert code == 0 and log.count("request failed: 401 from https://[redacted]@judge.example") == 32 and "and again" in log
    assert log.count("a program: [redacted]") == log.count("> Authorization: Bearer [redacted]") == 32
    count, found = search(run, said.out, said.err)
    assert count > 12 and found == []
    proof(f"32 secrets logged, {count} files and texts searched")


@pytest.mark.fault(87)
def test_a_reward_whose_error_holds_secrets_fails_without_them(
    start: Callable[..., tuple[int, Path]], capfd: pytest.CaptureFixture[str], proof: Proof
) -> None:
    code, run = start("--debug", "--set", "rewards.0.use=judge.py:fails")
    said = capfd.readouterr()
    status = read_json(run / "status.json")
    assert code == 5 == status["exit_code"]
    assert "the judge said 401 from https://[redacted]@judge.example" in said.err and "[redacted]" in status["message"]
    assert "Traceback" in said.err and "RuntimeError: the judge said" in said.err  # --debug was asked for
    count, found = search(run, said.out, said.err)
    assert found == []
    proof(f"exit 5 with {said.err.count('[redacted]')} places redacted, {count} files and texts searched")


@pytest.mark.fault(87)
def test_a_refused_recipe_leaves_nothing(
    start: Callable[..., tuple[int, Path]], capfd: pytest.CaptureFixture[str], proof: Proof
) -> None:
    code, run = start("--debug", "--set", f"engine.extra={{api_key: {INLINE['argument']}}}")
    said = capfd.readouterr()
    assert code == 2 and not run.exists() and search(run, said.out, said.err) == (2, [])
    proof("exit 2 for a key in the recipe; what was said does not have it")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.fault(87)
@pytest.mark.parametrize(
    "engine, expected",
    [
        ("{kind: server, launch: true, start_timeout: 200}", 0),
        ("{kind: server, launch: true, start_timeout: 200, extra: {no_such_argument: 1}}", 6),
        ("{kind: colocated}", 0),
        ("{kind: colocated, extra: {no_such_argument: 1}}", 6),
    ],
)
def test_no_engine_leaves_a_secret(
    planted: None, rlgen: Run, recipe_file: Path, tmp_path: Path, engine: str, expected: int, proof: Proof
) -> None:
    (tmp_path / "judge.py").write_text(REWARD)
    change = ["--set", "rewards.0.use=judge.py:logs", "--set", f"engine={engine}"]
    done = rlgen("--debug", "train", recipe_file, "--run-dir", tmp_path / "run", *change, **PLANTED)
    assert done.returncode == expected, done.stderr
    count, found = search(tmp_path / "run", done.stdout, done.stderr)
    assert found == []
    proof(f"engine {engine}: exit {expected}, {count} files and texts searched")


FORMS = [
    ("token hf_abcdefghijklmnopqrst!", "token [redacted]!"),
    ("https://me:pw@a.example/x", "https://[redacted]@a.example/x"),
    ("Authorization: Bearer abc.def-1", "Authorization: Bearer [redacted]"),
    ("{'authorization': 'Basic bWU6cHc='}", "{'authorization': 'Basic [redacted]'}"),
    ('{"api_key": "xyz", "b": 1}', '{"api_key": "[redacted]", "b": 1}'),
    ("?access_token=abcdefgh&x=1", "?access_token=[redacted]&x=1"),
    ("password=abc", "password=[redacted]"),
    ("AWS_SECRET_ACCESS_KEY=/abc+x", "AWS_SECRET_ACCESS_KEY=[redacted]"),
    ("ghp_abcdefghijklmnopqrstuvwx", "[redacted]"),
]
KEPT = [
    "max_prompt_tokens: 512, eos_token: <|im_end|>, the stop token: 259",
    "a bearer of news; basic functionality; token 12 of 64",
    "https://huggingface.co/org/model@main, http://127.0.0.1:8000/v1",
    "task-with-a-rather-long-name-indeed, risk-averse-behaviour-of-agents",
    "the secret of success, a password is needed, tokens/generated: 123456789",
]


@pytest.mark.parametrize("text, shown", [*FORMS, *[(text, text) for text in KEPT]])
def test_what_is_redacted(text: str, shown: str) -> None:
    assert redacted(text) == shown == redacted(shown)


def test_values_of_the_environment_are_redacted_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abcdef")
    monkeypatch.setenv("MY_SECRET", "abcdefghi")
    monkeypatch.setenv("SOME_PASSWORD", "true")  # too short to be told from a word
    assert redacted("abcdefghi abcdef true") == "[redacted] [redacted] true"


def test_names_of_secrets() -> None:
    secret = ["api_key", "HF_TOKEN", "token", "openai-api-key", "password", "judge_token", "client_secret", "Authorization"]
    plain = ["eos_token", "max_tokens", "api_key_env", "token_env", "tokens", "user_token", "keys", "monkey", "key", "author"]
    assert [name for name in secret + plain if is_secret_name(name)] == secret


def test_what_a_terminal_would_obey_is_escaped() -> None:
    hostile = "a\x1b[31mb\x1b]0;x\x07\rc\u202ed\x9be\ud800\n\tf é 😀 العربية <script>"
    assert printable(hostile) == "a\\x1b[31mb\\x1b]0;x\\x07\\rc\\u202ed\\x9be\\ud800\n\tf é 😀 العربية <script>"


def test_redaction_takes_linear_time() -> None:
    import time

    began = time.process_time()
    for piece in ("eyJ", "api_key: ", "://a", "sk-", "bearer ", "hf_", "password", "a.b-", " ", "authorization: bearer "):
        redacted(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 20 and os.environ


@pytest.mark.parametrize("before", [(1 << 16) - 20, (1 << 16) - (1 << 13) - 20, (1 << 17) - (1 << 13) - 20])
def test_a_secret_at_the_edge_of_a_block_is_redacted(before: int) -> None:
    """The line has no end: what is printed of it is cut, and no cut divides a secret."""
    secret = "hf_" + "aB3" * 12
    text = f"{'.' * before} {secret} {'.' * 150_000}"
    program = [sys.executable, "-c", "from rlgen.worker_pool.printed import copy_output; copy_output(0)"]
    said = subprocess.run(program, input=text, capture_output=True, text=True, timeout=HANGS).stdout
    assert said == text.replace(secret, "[redacted]")
