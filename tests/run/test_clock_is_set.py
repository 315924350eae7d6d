import json
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from rlgen.processes import Processes, born


def test_a_process_is_still_itself_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil reckons the beginning of a process from the machine's, which moves with the clock."""
    store = dist.HashStore()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as main:
        store.set("process_0", json.dumps([socket.gethostname(), main.pid, born(psutil.Process(main.pid))]))
        second = replace(Processes.alone(), rank=1, world=2, store=store)
        boot = psutil.boot_time()
        for step in (0.0, 3.0, -3600.0):
            monkeypatch.setattr(psutil._psplatform, "boot_time", lambda step=step: boot + step)
            assert second._process(0) is not None
            assert not second.speaks_last(), "the main process lives"
        main.kill()
        main.wait()
    assert second._process(0) is None
    assert second.speaks_last()
