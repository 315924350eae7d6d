import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from rlgen.processes import Processes, born


def test_a_process_is_still_itself_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil reckons the beginning of a process from the machine's, which moves with the clock."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as main:
        peers = ((socket.gethostname(), main.pid, born(psutil.Process(main.pid))),)
        second = replace(Processes.alone(), rank=1, world=2, peers=peers)
        boot = psutil.boot_time()
        for step in (0.0, 3.0, -3600.0):
            monkeypatch.setattr(psutil._psplatform, "boot_time", lambda step=step: boot + step)
            assert second._process(0) is not None
            assert not second.reports_end(), "the main process lives"
        main.kill()
        main.wait()
    assert second._process(0) is None
    assert second.reports_end()
