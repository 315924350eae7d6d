"""Two processes that share three stand-ins for servers, one of which is killed under them: by torchrun, from `test_fleet.py`."""

import os
import signal
import sys
from pathlib import Path

from helpers.waiting import HANGS, until
from test_fleet import SAMPLING, StandIn, pool_on, requests, right

from rlgen.engines.fleet import ServerPool
from rlgen.engines.server import ServerEngine
from rlgen.engines.shared_fleet import SharedServerPool
from rlgen.files import write_json
from rlgen.processes import Processes
from rlgen.types import Completion


def main(folder: Path) -> None:
    processes, said = Processes.open(60), list[str]()
    standing = [StandIn(number, apart=False) for number in range(3)] if processes.is_main else []
    for one in standing:
        one.ready()
        if one.number == 1:  # it answers no request before it is killed: both processes lose some
            one.server().call("POST", "/slow", {"seconds": HANGS})
    lost = processes.on_main(lambda: standing[1].process.pid)
    pools: list[ServerPool] = []
    shared = SharedServerPool(processes, lambda: pools.append(pool_on(standing, said)) or pools[0])
    engine, counts = ServerEngine(shared), []
    for step in (1, 2, 3):
        shared.sync(iter([]), step, False)
        counts.append(len(shared.servers))
        came: list[int] = []

        def finished(place: int, answer: Completion, came: list[int] = came, step: int = step) -> None:
            came.append(place)
            if step == 1 and len(came) == 8 and processes.rank == 1:
                os.kill(lost, signal.SIGKILL)

        answers = processes.run_all(lambda step=step: engine.generate(requests(step), SAMPLING, finished), keepalive=True)
        right(answers, step, step)
        assert sorted(came) == list(range(64))
        if step == 1:
            processes.run_all(lambda: until(lambda: sum(shared.brought_back.values()) == 1))
        if step == 2 and processes.is_main:
            standing[1].away = "killed"
            standing[1].mend()
            until(lambda: pools[0]._absent[standing[1].url].ready.is_set())
        processes.run_all(lambda: None)
    found = processes.gather([{"counts": counts, "said": said}])
    if processes.is_main:
        write_json(folder / "found.json", found)
        for one in standing:
            one.end()
    engine.close()
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
