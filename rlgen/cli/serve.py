"""`rlgen serve`: a vLLM server for a recipe's model, in the foreground."""

import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlgen.cli.output import echo
from rlgen.errors import EngineError, UsageError
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.models import ServerEngineRecipe, VllmRecipe
from rlgen.recipe.rules import is_loopback

if TYPE_CHECKING:
    from rlgen.engines.launch import ServerProcess

HOST, PORT = "127.0.0.1", 8000  # unless said


def serve_command(path: Path, overrides: list[str], host: str | None, port: int | None) -> None:
    """Serves until it is asked to stop.

    Raises:
        EngineError: the server did not start, or died.
        KeyboardInterrupt: it was asked to stop before it was ready.
    """
    recipe = load_recipe(path, overrides).recipe
    settings = server_settings(recipe, host, port)
    if not is_loopback(settings.host):
        echo(f"warning: {settings.host}: everyone who reaches this machine sees what is sent; for trusted networks only")

    from rlgen.engines import server_plan
    from rlgen.engines.launch import ServerProcess, claim
    from rlgen.models.load import locate
    from rlgen.models.tiny import cache_dir

    settings = settings.model_copy(update={"port": claim(settings.host, settings.port or 0)})
    folder = cache_dir() / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log, secret = folder / f"{settings.port}.log", folder / f"{settings.port}.token"
    with token_of(settings.token_env, secret) as (token, shown), stoppable():
        log.unlink(missing_ok=True)
        echo(f"starting vLLM on {recipe.model.path}; log: {log}")
        server = ServerProcess.start(server_plan(recipe, settings, locate(recipe.model.path)), token, log)
        try:
            seconds = server.wait_ready(settings.start_timeout)
            train = shlex.join(["rlgen", "train", str(path), *command_line([*overrides, connection(settings, server.url)])])
            echo(f"ready after {seconds:.0f} s at {server.url}; {shown} {train}")
            watch(server)
        finally:
            server.stop()


def server_settings(recipe: Recipe, host: str | None, port: int | None) -> ServerEngineRecipe:
    """The engine's settings of the recipe as those of a server to be started; host and port of the command line win.

    Raises:
        UsageError: the recipe's engine is none of vLLM's.
    """
    engine = recipe.engine
    if not isinstance(engine, VllmRecipe):
        raise UsageError(
            f"rlgen serve: engine.kind {engine.kind} has no server; add --set engine='{{kind: server, launch: true}}'"
        )
    launched = isinstance(engine, ServerEngineRecipe) and engine.launch
    server = engine if isinstance(engine, ServerEngineRecipe) else ServerEngineRecipe(kind="server", **shared(engine))
    changes = {
        "url": None,
        "launch": True,
        "host": host or (server.host if launched else HOST),
        "port": port if port is not None else (server.port if launched else PORT),
    }
    return server.model_copy(update=changes)


def connection(settings: ServerEngineRecipe, url: str) -> str:
    """The override that has a run train on the server at `url`."""
    said = {name: value for name in ("dtype", "token_env", "transfer") if (value := getattr(settings, name)) != default_of(name)}
    return f'engine={{kind: server, url: "{url}"{"".join(f", {name}: {value}" for name, value in said.items())}}}'


def default_of(name: str) -> object:
    return ServerEngineRecipe.model_fields[name].default


def command_line(overrides: list[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def shared(engine: VllmRecipe) -> dict[str, object]:
    """The settings that every engine of vLLM has."""
    return {name: getattr(engine, name) for name in VllmRecipe.model_fields}


def watch(server: "ServerProcess") -> None:
    """Returns when somebody asks to stop. Raises EngineError when the server dies."""
    try:
        while server.alive():
            time.sleep(0.2)
    except KeyboardInterrupt:
        echo("stopping")
        return
    raise EngineError(f"the vLLM server at {server.url} {server.last_words()}")


@contextmanager
def token_of(variable: str, path: Path) -> Iterator[tuple[str, str]]:
    """The token and how a client comes by it: from the environment, or a new one in a file that goes with the server."""
    from rlgen.engines.launch import new_token

    token = os.environ.get(variable)
    if token:
        yield token, f"with the same {variable}:"
        return
    token = new_token()
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    try:
        yield token, f"{variable}=$(cat {path})"
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, and so does the end of the terminal, unless `nohup` said otherwise."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
