"""`rlgen` that kills itself by SIGKILL at one instant: killed.py INSTANT train RECIPE …

An instant says what, and N@S: the N-th time in step S (0: never, only count). What is written beside the loop, of a checkpoint or
of a step's rollouts, belongs to the step that it is of, whatever the loop is at.

    before:MODULE:FUNCTION:N@S    half:…    after:…    when a call begins, inside it, when it has ended
    file:FRAGMENT:N@S                                  when a path with FRAGMENT is about to be written, renamed, made or removed

The variable COUNTED may name a file for how often it happened in step S, for those who choose N.
"""

import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

SCREEN = os.dup(2)  # before a run sends what is printed to its log
WRITING = os.O_WRONLY | os.O_RDWR
EVENTS = {"os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.rename": 1, "shutil.rmtree": 0, "shutil.move": 0}


class Count:
    """Kills at the n-th time in one step."""

    def __init__(self, instant: str) -> None:
        self.instant = instant
        self.last, self.step = map(int, instant.rpartition(":")[2].split("@"))
        self.now = self.times = 0

    def reached(self, path: str = "") -> bool:
        kind, _, saved = threading.current_thread().name.partition("-")
        rollouts = re.search(r"/rollouts/\D*(\d+)", path)
        step = int(saved) if kind == "save" else int(rollouts[1]) if rollouts else self.now
        if step != self.step:
            return False
        self.times += 1
        if "COUNTED" in os.environ:
            Path(os.environ["COUNTED"]).write_text(str(self.times))
        return self.times == self.last

    def follow_steps(self) -> None:
        from rlgen.trainers.collect import Collector

        real = Collector.sample

        def sample(collect: Any, step: int, *rest: Any) -> Any:
            self.now = step
            return real(collect, step, *rest)

        Collector.sample = sample  # type: ignore[method-assign]

    def die(self, what: str = "") -> None:
        os.write(SCREEN, f"KILLED {self.instant} {what}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def patch(where: str, module: str, function: str, count: Count) -> None:
    """Replaces `module.function` ("Class.method" too) by one that counts its calls."""
    *owners, name = function.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    @wraps(real)
    def counting(*arguments: Any, **named: Any) -> Any:
        if not count.reached():
            return real(*arguments, **named)
        if where == "before":
            count.die()
        if where == "half":
            return HALVES[function](real, count, *arguments, **named)
        result = real(*arguments, **named)
        count.die()
        return result

    setattr(owner, name, counting)


def half_a_record(real: Callable[..., Any], count: Count, path: Path, content: bytes, flushed: bool) -> None:
    real(path, content[: len(content) // 2], flushed)
    count.die()


def half_the_metrics(real: Callable[..., Any], count: Count, directory: Any, record: dict[str, Any]) -> None:
    text = json.dumps(record)
    with directory.metrics.open("a") as file:
        file.write(text[: len(text) // 2])
    count.die()


def half_a_backward(real: Callable[..., Any], count: Count, updater: Any, *arguments: Any) -> Any:
    """At the gradient of a layer in the middle."""
    trained = [parameter for parameter in updater.policy.parameters() if parameter.requires_grad]
    trained[len(trained) // 2].register_hook(lambda gradient: count.die())
    return real(updater, *arguments)


def half_the_weights(real: Callable[..., Any], count: Count, ledger: Any, weights: Any) -> Any:
    for place, item in enumerate(real(ledger, weights)):
        if place == 5:
            count.die()
        yield item


def half_a_generation(real: Callable[..., Any], count: Count, engine: Any, *arguments: Any) -> Any:
    """After three tokens of each completion."""
    vllm, decode = engine._llm.llm_engine, engine._llm.llm_engine.step
    steps: list[Any] = []

    def step() -> Any:
        steps.append(decode())
        if len(steps) == 3:
            count.die()
        return steps[-1]

    vllm.step = step
    return real(engine, *arguments)


def half_a_request(real: Callable[..., Any], count: Count, *arguments: Any) -> Any:
    """While a server works on all of them."""
    threading.Timer(0.03, count.die).start()
    return real(*arguments)


HALVES = {
    "append_bytes": half_a_record,
    "RunDirectory.write_metrics": half_the_metrics,
    "Updater._backward": half_a_backward,
    "SyncRecorder.record": half_the_weights,
    "ColocatedEngine._run": half_a_generation,
    "ServerEngine._sample": half_a_request,
}


def watch_files(fragment: str, count: Count) -> None:
    """Counts what is done to paths with `fragment`, whoever does it: no function of rlgen is named."""

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            written = isinstance(flags, int) and flags & WRITING
        elif event in EVENTS:
            path, written = arguments[EVENTS[event]], True
        else:
            return
        if written and fragment in str(path) and count.reached(str(path)):
            count.die(f"{event} {Path(str(path)).name}")

    sys.addaudithook(heard)


def arm(instant: str) -> None:
    count = Count(instant)
    where, *rest = instant.split(":")
    count.follow_steps()
    if where == "file":
        watch_files(rest[0], count)
    else:
        patch(where, rest[0], rest[1], count)


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from rlgen.cli.app import main

    main()
