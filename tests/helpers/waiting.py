"""How long tests wait for what must happen. No test passes or fails by how fast a machine is."""

import time
from collections.abc import Callable

HANGS = 1200.0  # seconds after which something is taken for hanging: it takes so long on no machine, however busy


def until(there: Callable[[], object]) -> None:
    """Waits until something is there."""
    deadline = time.monotonic() + HANGS
    while not there():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.01)
