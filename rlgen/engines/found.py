"""Finds the servers that there are now: by the list in `engine.url`, by a file or folder that it names, or by a name in DNS."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rlgen.engines.http import Server
from rlgen.errors import EngineError
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.recipe.rules import is_server_address, servers


def is_looked_up(settings: ServerEngineRecipe) -> bool:
    """Returns whether servers may join and leave: `engine.url` says where they are found."""
    return isinstance(settings.url, str) and urlsplit(settings.url).scheme in ("file", "dns")


def addresses(settings: ServerEngineRecipe) -> list[str]:
    """Returns the servers' URLs. Where they are looked up: none if file, folder or name does not exist (now)."""
    if not is_looked_up(settings):
        return servers(settings)
    place = urlsplit(str(settings.url))
    try:
        if place.scheme == "file":
            listed = addresses_in(Path(unquote(place.path)))
            return list(dict.fromkeys(address.rstrip("/") for address in listed))
        told = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = sorted({str(address[0]) for *_, address in told})
    return [f"http://{f'[{host}]' if ':' in host else host}:{place.port}" for host in hosts]


def addresses_in(path: Path) -> list[str]:
    """Returns the addresses in a file, or in the files that `rlgen serve --announce` keeps in a folder. Raises OSError."""
    if not path.is_dir():
        return path.read_text(encoding="utf-8", errors="replace").split()
    found: list[str] = []
    for file in sorted(path.iterdir()):
        if not file.name.startswith("."):  # as one does that is still being written
            with suppress(FileNotFoundError):  # its server has just ended
                found += file.read_text(encoding="utf-8", errors="replace").split()
    return found


def listed_servers(settings: ServerEngineRecipe, token: str) -> list[Server]:
    return [Server(url, token, settings.timeout, again=True) for url in addresses(settings)]


def first_found(listed: Callable[[], list[Server]], place: str, patience: float) -> list[Server]:
    """Returns the servers that answer, when one does.

    Raises EngineError if none does within `patience` seconds, those that do refuse the token, or `place` names no servers.
    """
    until = time.monotonic() + patience
    while True:
        there = listed()
        if not all(is_server_address(server.url) for server in there):  # what it holds may be a secret, and is not shown
            raise EngineError(f"engine.url: {place} holds text that is no server's address; write each like http://10.0.0.1:8000")
        health = [(server, server.health()) for server in there]
        if answering := [server for server, status in health if status == 200]:
            return answering
        for server in (one for one, status in health if status == 401):
            server.look()
        if time.monotonic() > until:
            raise EngineError(f"engine.url: no server of {place} answered within {patience:.0f} s (processes.timeout)")
        time.sleep(1)
