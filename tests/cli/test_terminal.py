"""Any kind of standard output, and texts of a model that a terminal would obey."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from conftest import RECIPE, ROOT, Proof, Run, read_jsonl
from helpers.rollouts import rollout_rows, rollout_writer
from helpers.runs import make_run
from helpers.samples import make_sample
from helpers.slow import slow_but
from rich.cells import cell_len

from rlgen import __version__ as rlgen_version
from rlgen.errors import RewardError
from rlgen.files import read_json
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.samples import Ragged, Samples
from rlgen.run.console import Console, Terminal
from rlgen.types import Prompt, ids_of, logp_of

Patch = pytest.MonkeyPatch
READ_BY_NOBODY = {
    "show": ("show",),
    "resolved": ("show", "--resolved"),
    "valid": ("validate",),
    "refused": ("validate", "--set", "run.steps=0"),
}
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "40", "PYTHONIOENCODING": "ascii"}


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_run_outlives_the_reader_of_its_output_and_an_old_code_page(recipe_file: Path, tmp_path: Path, proof: Proof) -> None:
    recipe_file.write_text(RECIPE + "engine: {kind: transformers}\n")
    command = [sys.executable, "-m", "rlgen", "train", str(recipe_file), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **PLAIN})
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    errors = process.stderr.read().decode("ascii")
    assert process.wait(200) == 0 and first.startswith(b"rlgen ") and "Traceback" not in errors and "BrokenPipe" not in errors
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"], len(read_jsonl(tmp_path / "run/metrics.jsonl"))) == ("done", 0, 2)
    proof("the reader left after one line; the run went on to its end, exit 0")


@pytest.mark.fault(18)
@pytest.mark.parametrize("name", slow_but(READ_BY_NOBODY, "show"))
def test_a_reader_that_goes_away_changes_no_exit_code(recipe_file: Path, name: str, proof: Proof) -> None:
    arguments = READ_BY_NOBODY[name]
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rlgen", arguments[0], str(recipe_file), *arguments[1:]]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, text=True)
    os.close(write)
    assert done.returncode == (2 if "--set" in arguments else 0)
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr
    proof(f"rlgen {' '.join(arguments)}: its reader had gone")


@pytest.mark.slow
@pytest.mark.fault(18)
def test_output_to_a_full_disk_changes_no_exit_code(recipe_file: Path, tmp_path: Path, monkeypatch: Patch, proof: Proof) -> None:
    recipe_file.write_text(RECIPE + "engine: {kind: transformers}\n")
    command = [sys.executable, "-m", "rlgen", "train", str(recipe_file), "--run-dir", str(tmp_path / "run"), "--max-steps"]
    with open("/dev/full", "w") as full:
        codes = [subprocess.run([*command, steps], stdout=full, stderr=full, timeout=100).returncode for steps in ("1", "-1")]
    assert codes == [0, 2] and len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 1
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        Terminal(quiet=False).say("one line")
        assert full.write("from here on it goes nowhere") and full.flush() is None
    proof("standard output and error on /dev/full: exit 0, and exit 2 for a mistake")


@pytest.mark.fault(14, 18)
@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["trian", "r.yaml"], "Did you mean 'train'?"),
        (["train", "r.yaml", "--reusme"], "--resume"),
        (["recipes", "lst"], "Did you mean 'list'?"),
        (["train", "r.yaml", "--max-steps", "many"], "'--max-steps'"),
        (["train"], "needs a recipe, a YAML file"),
    ],
)
def test_a_typo_is_answered_with_a_suggestion_on_any_terminal(rlgen: Run, arguments: list[str], hint: str, proof: Proof) -> None:
    done = rlgen(*arguments, **PLAIN)
    assert done.returncode == 2 and hint in done.stderr and "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    proof(f"rlgen {' '.join(arguments)}: {hint}")


@pytest.mark.fault(18, 81)
def test_nothing_from_a_recipe_is_obeyed_by_a_terminal(tmp_path: Path, proof: Proof) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + '"\\e[31mred\\e]0;title\\a": 1\n')
    settings = ["--set", "run.name='[red]x'", "--set", "run.dir=\udcff\x1b[2J"]
    said = on_terminal([sys.executable, "-m", "rlgen", "validate", str(path), *settings], 80, code=2)
    assert "\x1b" not in said and "\x07" not in said
    assert "\\x1b[31mred" in said and "[red]x" in said and "\\x1b[2J" in said.replace("\r\n", "")
    proof("escapes in a key, in a value and on the command line, on a real terminal")


HOSTILE = {
    "10 MB": "x" * 10_000_000,
    "escapes": "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08",
    "html": "<script>alert(1)</script>&amp;\"'",
    "markup": "[red]x[/red] [link=file:///etc/passwd]y[/link]",
    "other scripts": "😀 עברית العربية \u202eabc\u2066 \u2028\u2029\x85\ufeff",
    "lines": "a\nb\r\nc\x0b\x0c\x1c\x1d\x1e",
    "half a character": "\ud83d",
    "zero": "\x00",
}
COLUMNS = {name: text for name, text in HOSTILE.items() if name != "10 MB"}  # each row has them all


class Says:
    """A tokenizer whose ids are places in `HOSTILE`."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [list(HOSTILE.values())[one] for (one,) in ids]


def no_prompt(position: int) -> Prompt:
    return Prompt(position=position, row=0, text=HOSTILE["escapes"], prompt_ids=ids_of((1,)), columns=COLUMNS)


@pytest.mark.fault(81)
def test_completions_come_back_as_they_were(tmp_path: Path, proof: Proof) -> None:
    samples = [make_sample(sample_index=index, completion_ids=(index,), sampler_logp=(0.0,)) for index in range(len(HOSTILE))]
    count = len(samples)
    writer = rollout_writer(tmp_path, prompt_at=no_prompt, tokenizer=Says(), stop_ids=())
    empty = Ragged.of([logp_of(())] * count, np.float32)
    columns = Samples.of(samples, [])
    nothing = np.zeros(count)
    writer.write(Rollout(step=1, samples=columns, policy_logp=empty, advantage=nothing, trained=nothing.astype(bool)))
    writer.wait()
    writer.close()
    rows = rollout_rows(tmp_path, 1)
    assert [row["completion"] for row in rows] == [text.replace("\ud83d", "?") for text in HOSTILE.values()]
    assert {row["prompt"] for row in rows} == {HOSTILE["escapes"]}
    expected = {**COLUMNS, "half a character": '"\\ud83d"'}  # UTF-8 has none: as JSON text
    assert all(rows[0][name] == text for name, text in expected.items())
    proof(f"{', '.join(HOSTILE)}: written and read back")


@pytest.mark.fault(81)
def test_no_text_of_a_model_reaches_a_terminal_as_it_is(capfd: pytest.CaptureFixture[str], proof: Proof) -> None:
    with Console(2) as console:
        for text in list(HOSTILE.values())[1:]:
            console.say(f"{RewardError(text)}")
            Terminal(quiet=False).say(text)
    said = capfd.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said)
    assert said.count("[red]x[/red] [link=file:///etc/passwd]y[/link]") == 2 and "\\x1b[31mred" in said and "<script>" in said
    proof("escapes, marks of direction and markup are shown, not obeyed")


FIRST_LINE = """
import sys
HEAVY = ("torch", "transformers", "vllm", "rlgen.recipe", "rich", "numpy", "datasets", "accelerate")

class Ended(BaseException):
    pass

class Screen:
    encoding, closed = "utf-8", False
    def isatty(self): return False
    def fileno(self): raise OSError
    def flush(self): pass
    def write(self, text):
        if not isinstance(text, str):
            raise TypeError
        if not text:
            return
        sys.stderr.write(text + repr([name for name in HEAVY if name in sys.modules]))
        raise Ended

sys.stdout = Screen()
sys.argv = ["rlgen", "train", "recipe.yaml"]
import rlgen.__main__
"""
SHOW = """
import sys
from pathlib import Path
from rlgen.recipe import load_recipe
from rlgen.run.console import Example
from rlgen.run.live import open_console
from rlgen.run.directory import read_records

run, mode = Path(sys.argv[1]), sys.argv[2]
with open_console(mode, load_recipe(run / "resolved.yaml").recipe, quiet=False) as console:
    console.say("sentinel: " + "engine and trainer agree " * 8)
    for record in read_records(run / "metrics.jsonl"):
        if record["step"]:
            console.step(record, lambda: [Example(prompt="[red]What[/red]?", completion=sys.argv[3], reward=1.0)])
        else:
            console.evaluation(record)
    console.answer("finishing step 4")
"""


def test_the_first_line_comes_before_anything_heavy_is_imported() -> None:
    """Within a second, that is: what takes longer is imported after it (the time itself is in `rlgen docs watch`)."""
    done = subprocess.run([sys.executable, "-c", FIRST_LINE], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith(f"rlgen {rlgen_version}: recipe.yaml\n[]")


def on_terminal(
    command: list[str],
    columns: int,
    told: Callable[[str], bytes] = lambda said: b"",
    code: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a command writes to a terminal of that many columns, which has a keyboard, too: `told` says what is typed. It ends
    with this exit code; None: with any.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    base = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**base, "TERM": "xterm-256color", "PYTHONUTF8": "1", **(environment or {})},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    said = b""
    with suppress(OSError):  # the end, as Linux says it
        while part := os.read(ours, 4096):
            said += part
            if typed := told(said.decode(errors="replace")):
                os.write(ours, typed)
    os.close(ours)
    assert process.wait(60) == code or code is None
    return said.decode()


def lines_of(said: str) -> list[str]:
    """The lines that were drawn, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("colour", [{}, {"NO_COLOR": "1"}])
def test_the_live_view_on_a_terminal(tmp_path: Path, columns: int, colour: dict[str, str]) -> None:
    run = make_run(tmp_path / "mine", steps=4)
    said = on_terminal(
        [sys.executable, "-c", SHOW, str(run), "auto", HOSTILE["escapes"] + "x" * 200], columns, environment=colour
    )
    lines = lines_of(said)
    assert max(map(cell_len, lines)) <= columns and max(map(cell_len, lines)) > columns - 20
    whole = "\n".join(lines)
    assert "mine  step 4/4" in whole and "finishing step 4" in whole and "throughput" in whole and "eval 0/4" in whole
    assert "[red]What[/red]?" in whole and r"\x1b[31mred\x1b]0;title" in whole and "\x1b]0;" not in said
    coloured = {code for codes in re.findall(r"\x1b\[([\d;]*)m", said) for code in codes.split(";")} & {"31", "32", "33", "36"}
    assert bool(coloured) is not bool(colour)


def test_plain_lines_where_the_cursor_cannot_move(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", steps=4)
    command = [sys.executable, "-c", SHOW, str(run), "auto", "x"]
    piped = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TERM": "xterm"}, cwd=ROOT).stdout
    dumb = on_terminal(command, 80, environment={"TERM": "dumb"})
    for said in (piped, dumb):
        lines = [line for line in lines_of(said) if line]
        steps = [line for line in lines if line.startswith("step ")]
        assert [line[:8] for line in steps] == [f"step {step}/4" for step in (1, 2, 3, 4)] and "\x1b" not in said
        assert all(len(line) <= 80 and "left 0:" in line for line in steps) and lines[-1] == "finishing step 4"
    assert all(cell_len(line) <= 80 for line in lines_of(dumb))


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """The smoke recipe on vLLM, which writes about NUMA past Python: none of that is on the screen, all is in the logs."""
    run = tmp_path / "run"
    said = on_terminal([sys.executable, "-m", "rlgen", "train", str(ROOT / "recipes/smoke.yaml"), "--run-dir", str(run)], 80)
    lines = [line.rstrip() for line in lines_of(said) if line.strip()]
    assert lines[0].startswith("rlgen ") and max(map(cell_len, lines)) <= 80 + len(str(run))
    assert "NUMA" not in said and "Warning" not in said and "engine: loading vLLM, and starting it in this process …" in lines
    assert (run / "logs" / "output.log").exists() and lines[-1] == f"next: rlgen report {run}"
    assert any("step 3/3" in line for line in lines) and any(line.startswith("done: 3 of 3 steps") for line in lines)


@pytest.mark.slow
def test_ctrl_c_is_answered_on_a_terminal(recipe_file: Path, tmp_path: Path) -> None:
    """Typed when a step is drawn, not all of which are: the view answers, the run saves, and its last lines say how to go on."""
    recipe_file.write_text(RECIPE + "engine: {kind: transformers}\n")
    typed: list[str] = []

    def told(said: str) -> bytes:
        if typed or not re.search(r"step [1-9]\d*/500", said):
            return b""
        typed.append(said)
        return b"\x03"

    overrides = ["--set", "run.steps=500", "--run-dir", str(tmp_path / "run")]
    said = on_terminal([sys.executable, "-m", "rlgen", "train", str(recipe_file), *overrides], 100, told)
    lines = [line.strip() for line in lines_of(said)]
    assert any(re.fullmatch(r"(finishing|stopping before) step \d+, then saving; interrupt again to .*", line) for line in lines)
    next_line = f"next: rlgen train {recipe_file} --set run.steps=500 --run-dir {tmp_path}/run --resume"
    assert any(line.startswith("stopped: ") for line in lines) and next_line.replace(" ", "") in "".join(lines).replace(" ", "")
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and "error:" not in said
