"""Holds the environments that come with rlgen. An object is one conversation; a user's own is written in the same way."""

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any

Step = tuple[str, float, bool]  # observation, reward, done
INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters of an expression
LARGEST = 16 << 20  # bytes of an answer
REFUSED = "VALIDATION_ERROR"  # code of an action that does not fit the server's schema


class GuessNumber:
    """A number to guess. After each guess the model reads whether the number is higher or lower."""

    def __init__(self, highest: int = 100, guesses: int = 7) -> None:
        self.highest, self.left = highest, guesses

    def reset(self, prompt: Any, seed: int) -> None:
        self.number = Random(seed).randint(1, self.highest)

    def step(self, message: str) -> Step:
        """Takes the last whole number of the message as the guess. The right one earns 1.0."""
        self.left -= 1
        found = INTEGER.findall(message)
        if found and int(found[-1]) == self.number:
            return "right", 1.0, True
        said = "say a whole number" if not found else "higher" if int(found[-1]) < self.number else "lower"
        return said, 0.0, self.left <= 0


class Grid:
    """A square to cross, one step a turn, from one cell to another."""

    def __init__(self, size: int = 4, steps: int = 8) -> None:
        self.size, self.left = size, steps

    def reset(self, prompt: Any, seed: int) -> str:
        rng = Random(seed)
        cells = [(x, y) for x in range(self.size) for y in range(self.size)]
        self.at, self.goal = rng.sample(cells, 2)
        ahead = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return f"{ahead}\nYou are at {self.at[0]},{self.at[1]}. The goal is at {self.goal[0]},{self.goal[1]}."

    def step(self, message: str) -> Step:
        """Takes the last of up, down, left and right as the move. The goal earns 1.0."""
        self.left -= 1
        found = [word for word in re.findall(r"[a-z]+", message.lower()) if word in MOVES]
        if not found:
            return "say up, down, left or right", 0.0, self.left <= 0
        x, y = (min(max(at + by, 0), self.size - 1) for at, by in zip(self.at, MOVES[found[-1]], strict=True))
        self.at = x, y
        if self.at == self.goal:
            return "there", 1.0, True
        return f"You are at {x},{y}.", 0.0, self.left <= 0


class Calculator:
    """A calculator beside a question. A message that ends with `?` is computed; any other one is the answer."""

    def __init__(self, uses: int = 4) -> None:
        self.left = uses

    def reset(self, prompt: Any, answer: Any) -> None:
        """Takes the right answer from the data set's column `answer`."""
        self.question, self.answer = prompt, str(answer).strip()

    def demonstrate(self) -> str:
        """Returns a good first message: the question, to be computed."""
        return f"{str(self.question).rstrip('= ')}?"

    def step(self, message: str) -> Step:
        """Computes "37*52?", or compares the message with the answer, which earns 1.0 if it is the same."""
        text = message.strip()
        if not text.endswith("?"):
            return "", float(text == self.answer), True
        self.left -= 1
        try:
            said = str(parsed_value(ast.parse(text[:LONGEST].rstrip("?= "), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            said = "error"
        return said, 0.0, self.left <= 0


def parsed_value(node: ast.expr) -> Fraction:
    """Returns the value of an expression of whole numbers with + - * / and parentheses. Raises ValueError for any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](parsed_value(node.left), parsed_value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -parsed_value(node.operand)
    raise ValueError("no expression of whole numbers")


class OpenEnv:
    """One session, a WebSocket, on an OpenEnv server, which must allow as many at the same time as there are conversations.

    The messages are those of openenv-core 0.3: {"type": "reset", "data": {"seed": 7}}, {"type": "step", "data": ACTION}, and
    {"type": "close"}; the answers {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}, or
    {"type": "error", "data": {"message": ..., "code": ...}}.
    """

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


ENVIRONMENTS: dict[str, Callable[..., Any]] = {
    "guess_number": GuessNumber,
    "grid": Grid,
    "calculator": Calculator,
    "openenv": OpenEnv,
}
