"""`rlgen serve --announce`: the address stands in a file of its own while the server runs, and its removal ends the server."""

import errno
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlgen.cli.serve import address, announced, connection, serve_command, server_settings, watch
from rlgen.engines.found import addresses
from rlgen.errors import EngineError, UsageError
from rlgen.recipe import load_recipe
from rlgen.recipe.engines import ServerEngineRecipe

HERE = socket.gethostname()


def server(alive: bool = True) -> Any:
    return SimpleNamespace(alive=lambda: alive, url="http://node:8000", last_output=lambda: "was killed")


@pytest.mark.parametrize(
    "host, url",
    [
        ("0.0.0.0", f"http://{HERE}:8000"),
        ("::", f"http://{HERE}:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_others_get_an_address_that_they_reach(host: str, url: str) -> None:
    assert address(ServerEngineRecipe(kind="server", host=host, port=8000)) == url


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "server", "launch": True, "max_model_len": 40, "timeout": 9.0, "transfer_dir": "/a \U0001f600", "restarts": 7},
        {"kind": "server", "launch": True, "in_flight": {"recompute": False}, "servers": 2, "port": 9},
        {"kind": "colocated", "dtype": "bfloat16", "max_model_len": 40},
    ],
)
def test_the_command_that_is_printed_has_all_settings_of_the_run(recipe_file: Path, engine: dict[str, Any]) -> None:
    more = ["rollout.async_steps=1"] if "in_flight" in engine else []
    more += ["rollout.max_completion_tokens=8", "data.max_prompt_tokens=8"]
    served = load_recipe(recipe_file, [*more, f"engine={json.dumps(engine, ensure_ascii=False)}"])
    to_it = connection(server_settings(served.recipe, None, None), "http://a:1")
    found = load_recipe(recipe_file, [*more, to_it]).recipe.engine
    kept = {name: value for name, value in engine.items() if name not in ("launch", "servers", "port")}
    assert found.model_dump(exclude_defaults=True) == {**kept, "kind": "server", "url": "http://a:1"}


def test_trainers_find_the_servers_of_a_folder(tmp_path: Path) -> None:
    settings = ServerEngineRecipe(kind="server", url=f"file://{tmp_path}")
    with announced(tmp_path, "http://b:8001") as there:
        with announced(tmp_path, "http://a:8000"):
            (tmp_path / ".c:8000.17").write_text("http://c")  # not written to its end
            assert addresses(settings) == ["http://a:8000", "http://b:8001"] and there()
            (tmp_path / "gone").symlink_to("nowhere")  # as a file that is removed between two looks
            assert addresses(settings) == ["http://a:8000", "http://b:8001"]
        assert addresses(settings) == ["http://b:8001"], "its server has ended"
    shutil.rmtree(tmp_path)
    assert addresses(settings) == []


def test_a_server_ends_when_its_file_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with announced(tmp_path, "http://a:8000") as there:
        with pytest.raises(EngineError, match="the vLLM server at http://node:8000 was killed"):
            watch(server(alive=False), there)
        shutil.rmtree(tmp_path)
        watch(server(), there)
    assert capsys.readouterr().out == "stopping: the file with its address was removed\n"
    with announced(tmp_path, "http://a:8000") as there:  # the folder was removed while it started
        assert not there() and not tmp_path.exists()
    with announced(None, "http://a:8000") as there:
        assert there()


def test_a_file_system_that_does_not_answer_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with announced(tmp_path, "http://a:8000") as there, monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fails)
        assert there()


def test_the_folder_must_be_there(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--announce: there is no folder {tmp_path}/none; make it first"):
        serve_command(recipe_file, [], None, None, tmp_path / "none")
