"""The table of `make faults`: what was produced, how it is known, how long it took."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from faults.cases import ABSENT, CASES, GPU, PARTLY


@dataclass
class Row:
    """One line of the list of faults."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        for problem, tests in (("FAILED", self.failed), ("skipped", self.skipped), ("no proof that it happened", self.unproven)):
            if tests:
                return f"{problem}: {tests[0]}"
        return None if self.passed else "no test"


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
            elif report.skipped:
                row.skipped.append(report.nodeid)
            elif report.when == "call":
                proofs = [str(value) for name, value in properties if name == "proof"]
                row.passed += 1
                row.proofs += proofs
                row.unproven += [] if proofs else [report.nodeid]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(terminalreporter.config, "workerinput"):
            return
        write = terminalreporter.write_line
        write(f"{'#':>3}  {'fault':50}  {'tests':>5}  {'s':>6}  how it is known to have happened")
        for number, title in CASES.items():
            row = self.rows[number]
            if number in self.waiting:
                write(f"{number:3}  {title:50}  {'-':>5}  {'-':>6}  {ABSENT.get(number, 'needs a GPU')}")
                continue
            more = f" (and {len(row.proofs) - 1} more)" if len(row.proofs) > 1 else ""
            without = f"; not shown: {PARTLY[number]}" if number in PARTLY else ""
            write(f"{number:3}  {title:50}  {row.passed:5}  {row.seconds:6.1f}  {row.problem or row.proofs[0] + more + without}")
        shown = [number for number in CASES if number not in self.waiting]
        failed = sum(self.rows[number].problem is not None for number in shown)
        gpu = len(self.waiting - ABSENT.keys())
        write(f"{gpu} need a GPU, {len(self.waiting) - gpu} have nothing to happen to")
        write(f"{len(shown) - failed} passed, {failed} failed")

    @property
    def waiting(self) -> set[int]:
        """Faults that cannot be produced here."""
        return {number for number in {*GPU, *ABSENT} if not self.rows[number].passed}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and any(
            self.rows[number].problem for number in CASES if number not in self.waiting
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
