"""Leads conversations with an environment on an OpenEnv server, each in a session of its own: one WebSocket.

The messages are those of OpenEnv (openenv-core 0.3): {"type": "reset", "data": {"seed": 7}}, {"type": "step", "data": ACTION},
and {"type": "close"}; the answers {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}, or
{"type": "error", "data": {"message": ..., "code": ...}}.
"""

import json
from typing import Any

LARGEST = 16 << 20  # bytes of an answer
REFUSED = "VALIDATION_ERROR"  # code of an action that does not fit the server's schema


class OpenEnv:
    """One session. The server must allow as many at the same time as there are conversations."""

    def __init__(
        self, url: str, action: str | None = None, observation: str | None = None, also: dict[str, Any] | None = None
    ) -> None:
        """Stores the settings; `reset` connects.

        Args:
            url: of the server, http or https.
            action: the field of an action that holds what the model says. None: the model writes the whole action, as JSON.
            observation: the field of an observation that the model reads. None: all of it, as JSON.
            also: further fields of each action.
        """
        self._url, self._action, self._observation, self._also = url.rstrip("/"), action, observation, also or {}
        self._http: Any = None
        self._socket: Any = None

    async def reset(self, prompt: Any, seed: int) -> str:
        """Begins an episode, and returns the row's prompt with the first observation below it."""
        import aiohttp

        self._http = aiohttp.ClientSession()
        try:
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST)
        except aiohttp.ClientError as error:
            raise ConnectionError(f"no OpenEnv server answers at {self._url}: {error}") from error
        found = self._observed(await self._told({"type": "reset", "data": {"seed": seed}}))
        ahead = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return f"{ahead}\n{self._text(found)}"

    async def step(self, message: str) -> tuple[str, float, bool]:
        """Takes an action. One that cannot be read is answered to the model; a reward that the server leaves out is 0."""
        action: Any = {self._action: message} if self._action is not None else None
        if action is None:
            try:
                action = json.loads(message)
            except ValueError as error:
                return f"Error: this is no JSON: {error}", 0.0, False
            if not isinstance(action, dict):
                return "Error: an action is a JSON object", 0.0, False
        answer = await self._told({"type": "step", "data": {**self._also, **action}})
        if answer["data"].get("code") == REFUSED:
            return "Error: this is no action of this environment", 0.0, False
        found = self._observed(answer)
        return self._text(found), float(found.get("reward") or 0.0), bool(found.get("done"))

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _told(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive_json()
        except TypeError as error:  # the socket is closed: what came is no text
            raise ConnectionError(f"the OpenEnv server at {self._url} has closed the session") from error
        return {"type": answer.get("type"), "data": answer.get("data") or {}}

    def _observed(self, answer: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = answer["data"]
        if answer["type"] != "observation":
            raise ConnectionError(f"the OpenEnv server at {self._url}: {data.get('code')}: {data.get('message')}")
        return data

    def _text(self, found: dict[str, Any]) -> str:
        shown = found.get("observation", {})
        if self._observation is not None:
            shown = shown[self._observation]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
