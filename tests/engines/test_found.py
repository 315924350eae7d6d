"""Servers that are found, and servers that are refused."""

import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import Told, engine_info
from helpers.waiting import HANGS

from rlgen.engines import open as engines_open
from rlgen.engines.base import EngineCapabilities
from rlgen.engines.fleet import ServerPool
from rlgen.engines.found import addresses, first_found
from rlgen.engines.http import Server
from rlgen.engines.open import build_engine, servers_token
from rlgen.errors import EngineError, ServerLost, SetupError
from rlgen.models.tiny import build_tiny
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.recipe.engines import ServerEngineRecipe


def settings_of(url: str) -> ServerEngineRecipe:
    return ServerEngineRecipe(kind="server", url=url)


def pool(*urls: str) -> ServerPool:
    servers = [Server(url, "token", HANGS) for url in urls]
    settings: dict[str, Any] = {"abilities": EngineCapabilities(), "restarts": 0, "carrier": None, "say": print}
    return ServerPool(servers=servers, processes={}, shape={}, row_tokens=640, **settings)


def test_a_file_that_names_no_servers_or_only_such_as_refuse_the_token_is_an_error_at_once(tmp_path: Path) -> None:
    file = tmp_path / "my servers.txt"  # written as %20 in an address
    settings = settings_of(file.as_uri())

    def found(text: str, status: int = 200) -> list[str]:
        file.write_bytes(os.fsencode(text))
        servers = [Told(url, "token", HANGS) for url in addresses(settings)]
        for number, server in enumerate(servers):
            server.status = 0 if number else status  # only the first of them answers
        return [server.url for server in first_found(lambda: list(servers), "FILE", 0.0)]

    assert found("http://a:1/\nhttp://b:1\nhttp://a:1\n") == ["http://a:1"]
    assert addresses(settings) == ["http://a:1", "http://b:1"]
    for text, status, words in (
        ("http://a:1\nhf_secret", 200, "FILE holds text that is no server's address; write each like http://10.0.0.1:8000$"),
        ("\udcff", 200, "FILE holds text that is no server"),
        ("http://a:1\nhttp://b:1", 401, r"http://a:1 refuses rlgen's token; set the variable that engine\.token_env names"),
        ("http://a:1\nhttp://b:1", 503, r"no server of FILE answered within 0 s \(processes\.timeout\)"),
    ):
        with pytest.raises(EngineError, match=words):
            found(text, status)


def test_without_a_token_it_is_that_which_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not a server of those that may come and go."""
    monkeypatch.delenv("RLGEN_SERVER_TOKEN", raising=False)
    (tmp_path / "gone").write_text("http://127.0.0.1:9\n")
    with pytest.raises(SetupError, match="the environment variable RLGEN_SERVER_TOKEN is not set"):
        servers_token(settings_of(f"file://{tmp_path}"))
    with pytest.raises(ServerLost, match="no server listens there"):
        servers_token(settings_of("http://127.0.0.1:9"))


def test_a_run_of_one_process_waits_for_servers_too(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGEN_SERVER_TOKEN", "token")
    engine = {"kind": "server", "url": f"file://{tmp_path}/none"}
    recipe = load_recipe(recipe_file, [f"engine={json.dumps(engine)}", "processes.timeout=1.0"]).recipe
    with pytest.raises(EngineError, match=r"no server of file://\S+ answered within 1 s \(processes\.timeout\)"):
        build_engine(recipe.engine_needs, "a model", Processes.alone(), tmp_path, print)


@pytest.mark.parametrize("urls", [["http://a:1"], ["http://a:1", "http://b:1"]])
def test_it_waits_for_those_of_a_list_if_they_are_several(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("RLGEN_SERVER_TOKEN", "token")
    monkeypatch.setattr(engines_open, "ServerPool", lambda **settings: given.update(settings))
    monkeypatch.setattr(engines_open, "ServerEngine", lambda *_: None)
    recipe = load_recipe(recipe_file, [f"engine={json.dumps({'kind': 'server', 'url': urls})}"]).recipe
    build_engine(recipe.engine_needs, str(build_tiny("qwen3")), Processes.alone(), tmp_path, print)
    given["carrier"].close()
    assert given["patience"] == (recipe.processes.timeout if len(urls) > 1 else 0.0)


def test_a_name_has_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, 0, 0, "", ("10.0.0.2", 8000)), (0, 0, 0, "", ("10.0.0.1", 8000)), (0, 0, 0, "", ("::5", 8000, 0, 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda host, port, type: told if (host, port) == ("vllm", 8000) else None)
    assert addresses(settings_of("dns://vllm:8000")) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[::5]:8000"]


@pytest.mark.parametrize("most", [639, 640, None])
def test_a_server_whose_rows_are_too_short_is_refused(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """vLLM ends a completion at its `max_model_len`, as if it had the length that was asked for."""
    monkeypatch.setattr(ServerPool, "_examined", staticmethod(lambda server, shape: engine_info(max_model_len=most)))
    refused = pytest.raises(EngineError, match=r"http://a has rows of 639 tokens at most .* take up to 640")
    with refused if most == 639 else nullcontext():
        pool("http://a")


OTHER: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"stop_ids": (7,)}, {"quantization": "fp8"}, {"wider": ("gate.weight",)}]


@pytest.mark.parametrize("other", OTHER)
def test_servers_with_different_settings_are_refused(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    """All are sent the same tensors: if one holds a router in float32, its weights may not be rounded."""
    facts = {"http://a": engine_info(), "http://b": engine_info(**other)}
    monkeypatch.setattr(ServerPool, "_examined", staticmethod(lambda server, shape: facts[server.url]))
    with pytest.raises(EngineError, match="http://b and http://a have different settings"):
        pool(*facts)


def test_a_server_of_another_version_of_rlgen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asdict(engine_info()) | {"shape": {}}
    for lacks in ("cache_block", "shape"):
        monkeypatch.setattr(Server, "rpc", lambda *_, lacks=lacks: [{name: told[name] for name in told if name != lacks}])
        with pytest.raises(EngineError, match=rf"http://a has another version of rlgen than this run \(.*{lacks}"):
            Server("http://a", "token", HANGS).facts()
