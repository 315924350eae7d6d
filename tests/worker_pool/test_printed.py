"""What the user's code prints: it goes to the log, and holds nothing up."""

import os
import signal
import tempfile
import time
from io import FileIO
from pathlib import Path

import pytest
from helpers.scoring import SKIPS, alive, group, overdue, totals
from helpers.waiting import HANGS, until

from rlgen.errors import CheckpointError


@pytest.mark.fault(32)
def test_what_a_reward_prints_goes_to_the_log(scorer, tmp_path, capfd, monkeypatch, proof):
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    source = """
        import os, sys

        def f(completion):
            print("printed" * 1000)
            print("to the other", file=sys.stderr)
            os.system("echo by a child")
            return float(sys.stdin.read() == "")
    """
    build = scorer(source, output=tmp_path / "rewards.log")
    assert totals(build.score([group(*"ab" * 50)], 1)) == [[1.0] * 100]
    build.close()
    text = (tmp_path / "rewards.log").read_text()
    assert (text.count("printed"), text.count("to the other"), text.count("by a child")) == (100_000, 100, 100)
    assert capfd.readouterr() == ("", "")
    proof("700 kB were printed, all in the log, none on the screen")


def test_a_log_that_grows_too_long_starts_anew(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("rlgen.worker_pool.process.LONGEST_LOG", 1000)
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    log = tmp_path / "rewards.log"
    build = scorer("def f(completion):\n    print(completion * 50)\n    return 1.0\n", output=log)
    build.score([group(*"abcdefghijklmnopqrstuvwxyz")], 1)
    until(lambda: "z" * 50 in log.read_text())
    build.score([group("y")], 2)
    build.close()
    text = log.read_text()
    assert "left out" in text and "y" * 50 in text and "a" * 50 not in text


@pytest.mark.fault(32)
def test_no_way_of_printing_holds_anything_up(scorer, tmp_path, monkeypatch, proof):
    source = f"""
        import os, subprocess

        def f(completion):
            if completion == "much":
                os.system("yes 0123456789 2>/dev/null | head -c 1100000")
            if completion == "killed":
                os.system("echo before it was killed; sleep 100000")
            if completion == "stray":  # out of reach: neither the group nor the mark of its worker
                subprocess.run("env -i setsid sleep 100000 & echo $! > {tmp_path}/stray", shell=True)
            return 1.0
    """
    log = tmp_path / "log"
    overdue(monkeypatch, lambda completion: 0.0 if completion == "killed" and "it was killed" in log.read_text() else None)
    build = scorer(source, SKIPS, output=log)
    assert totals(build.score([group("much", "stray")], 1)) == [[1.0, 1.0]]
    assert totals(build.score([group("killed", "a")], 2)) == [[None, 1.0]]
    until(lambda: log.read_text().count("0123456789\n") == 100_000)
    stray, start = int((tmp_path / "stray").read_text()), time.monotonic()
    build.close()
    seconds = time.monotonic() - start
    assert alive(stray)
    os.kill(stray, signal.SIGKILL)
    text = log.read_text()
    assert (text.count("0123456789\n"), text.count("before it was killed\n")) == (100_000, 1) and seconds < HANGS
    proof(f"1.1 MB by a program, a line of a worker that was killed; a stray kept the pipe and {seconds:.1f} s of the end")


@pytest.mark.fault(32)
def test_programs_go_on_printing_after_the_process_they_printed_to_was_killed(scorer, tmp_path, monkeypatch, proof):
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    source = """
        import os, subprocess

        def f(completion):
            if completion == "exit":
                os._exit(1)
            return float(subprocess.run(["echo", completion]).returncode)
    """
    build = scorer(source, SKIPS, scoring={"workers": 1}, output=tmp_path / "rewards.log")
    printed = build.pools[0]._printer.process
    printed.kill()
    os.waitid(os.P_PID, printed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody was told
    assert totals(build.score([group("exit", "by a program")], 1)) == [[None, 0.0]]
    build.close()
    assert (tmp_path / "rewards.log").read_text() == "by a program\n"
    proof("killed by SIGKILL; what a program of the next worker prints is in the log")


def test_a_full_disk_costs_what_is_printed_and_no_reward(scorer):
    build = scorer("def f(completion):\n    print(completion, flush=True)\n    return 1.0\n", output=Path("/dev/full"))
    assert totals(build.score([group("a", "b")], 1)) == [[1.0, 1.0]]


def test_a_full_folder_of_temporary_files_is_an_error_of_the_disk(scorer, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering=0: FileIO("/dev/full", "r+"))
    with pytest.raises(CheckpointError, match=r"no temporary file can be written: .*No space left.*TMPDIR") as caught:
        scorer("def f(completion): return 1.0\n")
    assert caught.value.exit_code == 8
