"""A server of somebody else, behind a proxy that is busy for a moment: it is asked again; one that stays so is lost."""

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web

from rlgen.engines import client
from rlgen.engines.client import Line
from rlgen.engines.http import Server
from rlgen.errors import EngineError, ServerLost


def posted(monkeypatch: pytest.MonkeyPatch, statuses: Iterator[int], again: bool = True) -> tuple[bytes, int]:
    """What the client gets from a server that answers with these statuses, and how often it was asked."""
    monkeypatch.setattr(client, "AGAIN", (0.0, 0.0, 0.0))
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.text())
        return web.Response(status=next(statuses), text=f"answer {len(asked)}")

    async def run() -> bytes:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}", "token", 5.0, again)
        try:
            async with server.session() as session:
                return await Line(server, session).post("/generate", b"the same")
        finally:
            await runner.cleanup()

    said = asyncio.run(run())
    assert set(asked) == {"the same"}
    return said, len(asked)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_moment_of_trouble_is_waited_for(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    assert posted(monkeypatch, iter([status, status, 200])) == (b"answer 3", 3)


def test_what_stays_so_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerLost, match="failed at /generate with 503: answer 4"):
        posted(monkeypatch, iter([503] * 9))
    with pytest.raises(EngineError, match="answered /generate with 429: answer 4"):
        posted(monkeypatch, iter([429] * 9))


def test_a_refusal_and_a_server_of_our_own_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="answer 1"):
        posted(monkeypatch, iter([400, 200]))
    with pytest.raises(ServerLost, match="answer 1"):
        posted(monkeypatch, iter([500, 200]), again=False)
