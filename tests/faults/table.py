"""The table of `make faults`: what was produced, how it is known, how long it took."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from faults.cases import CASES, GPU


@dataclass
class Row:
    """One line of the list of faults."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        if self.failed:
            return f"FAILED: {self.failed[0]}"
        if not self.passed:
            return "no test"
        return None if self.proofs else "no proof that it happened"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("faults"):
        config.pluginmanager.register(Table())


class Table:
    """Collects the reports of tests that are marked with a fault."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = defaultdict(Row)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        # Among the properties, because those travel from a worker to the process that prints.
        numbers = [number for marker in item.iter_markers("fault") for number in marker.args]
        report.user_properties.append(("faults", numbers))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = [(name, value) for name, value in report.user_properties if name in ("faults", "proof")]
        numbers = {number for name, value in properties if name == "faults" for number in value}  # type: ignore[attr-defined]
        for number in numbers:
            row = self.rows[number]
            row.seconds += report.duration
            if report.failed:
                row.failed.append(report.nodeid)
            elif report.when == "call" and report.passed:
                row.passed += 1
                row.proofs += [str(value) for name, value in properties if name == "proof"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(terminalreporter.config, "workerinput"):
            return
        write = terminalreporter.write_line
        write(f"{'#':>3}  {'fault':50}  {'tests':>5}  {'s':>6}  how it is known to have happened")
        good = 0
        for number, title in CASES.items():
            row = self.rows[number]
            if number in GPU and not row.passed:
                write(f"{number:3}  {title:50}  {'-':>5}  {'-':>6}  needs a GPU")
                continue
            good += row.problem is None
            more = f" (and {len(row.proofs) - 1} more)" if len(row.proofs) > 1 else ""
            write(f"{number:3}  {title:50}  {row.passed:5}  {row.seconds:6.1f}  {row.problem or row.proofs[0] + more}")
        waiting = sum(number in GPU and not self.rows[number].passed for number in CASES)
        write(f"{good} passed, {len(CASES) - good - waiting} failed" + (f", {waiting} need a GPU" if waiting else ""))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and any(
            self.rows[number].problem for number in CASES if not (number in GPU and not self.rows[number].passed)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
