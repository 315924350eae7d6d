"""Runs a vLLM server for a recipe's model in the foreground: `rlgen serve`."""

import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlgen.cli.output import echo
from rlgen.errors import EngineError, UsageError
from rlgen.files import write_text
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.engines import ServerEngineRecipe, VllmRecipe
from rlgen.recipe.rules import is_loopback
from rlgen.recipe.sizes import is_written

if TYPE_CHECKING:
    from rlgen.engines.launch import ServerProcess

HOST, PORT = "127.0.0.1", 8000  # defaults
# The settings of `engine` that have an effect on a run beside engine.url.
OF_RUN = {"dtype", "max_model_len", "token_env", "timeout", "restarts", "transfer", "transfer_dir", "lora", "in_flight"}


def serve_command(path: Path, overrides: list[str], host: str | None, port: int | None, announce: Path | None) -> None:
    """Serves until it is asked to stop. Raises EngineError if the server did not start, or died."""
    if announce is not None and not announce.is_dir():
        raise UsageError(f"--announce: there is no folder {announce}; make it first, for servers end when it is removed")
    recipe = load_recipe(path, overrides).recipe
    settings = server_settings(recipe, host, port)
    if isinstance(recipe.engine, ServerEngineRecipe) and recipe.engine.servers > 1:
        on = f" on GPU {settings.devices}" if settings.devices else ""
        echo(
            f"one of {recipe.engine.servers} servers (engine.servers){on}: start each of the others with its own --port and"
            " --set engine.devices=..., and list all of them in engine.url"
        )
    if not is_loopback(settings.host):
        echo(f"warning: {settings.host}: everyone who reaches this machine sees what is sent; for trusted networks only")

    from rlgen.engines.launch import ServerProcess, claim, wait_all_ready
    from rlgen.engines.open import server_plans
    from rlgen.models.load import locate
    from rlgen.models.tiny import cache_dir

    settings = settings.model_copy(update={"port": claim(settings.host, settings.port or 0)})
    folder = cache_dir() / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{socket.gethostname()}-{settings.port}"  # machines may share this folder
    log, secret = folder / f"{name}.log", folder / f"{name}.token"
    with token_of(settings.token_env, secret) as (token, shown), stoppable():
        log.unlink(missing_ok=True)
        echo(f"starting vLLM on {recipe.model.path}; log: {log}")
        served = with_sizes(recipe).model_copy(update={"engine": settings})
        (plan,) = server_plans(served.engine_needs, locate(recipe.model.path))
        server = ServerProcess(plan, token, log, settings.start_timeout)
        try:
            seconds = wait_all_ready([server], settings.start_timeout)
            sets = (word for override in (*overrides, connection(settings, server.url)) for word in ("--set", override))
            echo(f"ready after {seconds:.0f} s at {server.url}; {shown} {shlex.join(['rlgen', 'train', str(path), *sets])}")
            with announced(announce, address(settings)) as wanted:
                watch(server, wanted)
        finally:
            server.stop()


def with_sizes(recipe: Recipe) -> Recipe:
    """Returns the recipe with the length of its longest row, which the server must hold. Reads the data unless the recipe sets
    data.max_prompt_tokens, rollout.max_completion_tokens and, with evaluations, eval.max_prompt_tokens.
    """
    needed = ["data.max_prompt_tokens", "rollout.max_completion_tokens", *(["eval.max_prompt_tokens"] if recipe.eval else [])]
    if all(is_written(recipe, path) for path in needed):
        return recipe
    from rlgen.setup.data import open_data

    return open_data(recipe).recipe


def server_settings(recipe: Recipe, host: str | None, port: int | None) -> ServerEngineRecipe:
    """Returns the settings of the server to start, from the recipe's engine. Host and port as given take precedence."""
    engine = recipe.engine
    if not isinstance(engine, VllmRecipe):
        raise UsageError(
            f"rlgen serve: engine.kind {engine.kind} has no server; add --set engine='{{kind: server, launch: true}}'"
        )
    launched = isinstance(engine, ServerEngineRecipe) and engine.launch
    shared = {name: getattr(engine, name) for name in VllmRecipe.model_fields}
    server = engine if isinstance(engine, ServerEngineRecipe) else ServerEngineRecipe(kind="server", **shared)
    changes = {
        "url": None,
        "launch": True,
        "servers": 1,
        "devices": server.devices_of(0),
        "host": host or (server.host if launched else HOST),
        "port": port if port is not None else (server.port if launched else PORT),
    }
    return server.model_copy(update=changes)


def connection(settings: ServerEngineRecipe, url: str) -> str:
    """Returns the `--set` override that makes a run use the server at `url`."""
    said = settings.model_dump(mode="json", include=OF_RUN, exclude_defaults=True)
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in said.items()}  # YAML refuses the halves of an emoji
    return f'engine={{kind: server, url: "{url}"{"".join(f", {name}: {value}" for name, value in values.items())}}}'


def address(settings: ServerEngineRecipe) -> str:
    """Returns the URL at which other machines reach the server: by this machine's name if it listens on all addresses."""
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


@contextmanager
def announced(folder: Path | None, url: str) -> Iterator[Callable[[], bool]]:
    """Keeps `url` in a file of its own in `folder` within the block. Yields what says whether the file is still there.

    A file for each server needs no lock, which not every shared file system has.
    """
    if folder is None or not folder.is_dir():
        yield lambda: folder is None
        return
    file = folder / urlsplit(url).netloc
    write_text(file, f"{url}\n")

    def there() -> bool:
        try:
            file.stat()
        except FileNotFoundError:
            return False
        except OSError:  # the file system does not answer for a moment
            return True
        return True

    try:
        yield there
    finally:
        with suppress(OSError):
            file.unlink()


def watch(server: "ServerProcess", wanted: Callable[[], bool]) -> None:
    """Waits until the user asks to stop, or it is not wanted any more. Raises EngineError if the server dies."""
    try:
        while server.alive():
            if not wanted():
                echo("stopping: the file with its address was removed")
                return
            time.sleep(0.2)
    except KeyboardInterrupt:
        echo("stopping")
        return
    raise EngineError(f"the vLLM server at {server.url} {server.last_output()}")


@contextmanager
def token_of(variable: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yields the token, and how a client gets it: from the environment, or from a new file that is deleted in the end."""
    from rlgen.engines.launch import new_token

    if token := os.environ.get(variable):
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
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt within the block, unless they were ignored before, as `nohup` does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
