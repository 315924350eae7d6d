"""Asks an OpenAI-compatible endpoint: within a time, with retries, within a budget, and each question only once."""

import asyncio
import hashlib
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgen.errors import RewardError
from rlgen.files import open_log, written
from rlgen.recipe.judges import JudgeArgs
from rlgen.worker_pool.failures import redact_and_shorten

PASSING = (408, 409, 425, 429)  # status codes of temporary failures, besides 5xx
# Seconds before a request is sent again; each wait is twice the one before, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
RESERVE = 0.9  # share of the call's timeout within which the judge answers or fails by itself, with the reason
SHOWN = 300  # characters of an answer in a message


class NoAnswer(Exception):
    """Raised when the judge does not answer."""


class Passing(Exception):
    """Raised by a failure after which the request is sent again; `wait`: seconds that the server asks for."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class Answers:
    """The answers of one judge so far, in memory and in a folder of the run: the same request gets the same answer, also after a
    resume. One file for each judge and process of training, one line for each request that was sent:

    {"request": "SHA-256", "answer": "Score: 7", "tokens": 321}     an answer
    {"failed": "HTTP 503"}                                           no answer; it counts as a request, too
    """

    def __init__(self, folder: Path | None, name: str, rank: int) -> None:
        """Reads what all processes and earlier attempts have written. Raises CheckpointError if a file cannot be read.

        Args:
            folder: None: answers are kept in memory only.
            name: of the judge, without @.
            rank: of the process of training that this one serves.
        """
        self.requests = self.tokens = 0  # sent and paid by this process, earlier attempts included
        self.known: dict[str, str] = {}  # hash of a request -> its answer
        self._path = None if folder is None else folder / f"{name}@{rank}.jsonl"
        if folder is None:
            return
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*@*.jsonl")):
                if path.name.rpartition("@")[0] == name:
                    self._read(path)

    def keep(self, request: str, answer: str, tokens: int) -> None:
        """Stores an answer. Raises CheckpointError if it cannot be written."""
        self.write({"request": request, "answer": answer, "tokens": tokens})
        self.known[request] = answer
        self.tokens += tokens

    def write(self, record: dict[str, str | int]) -> None:
        if self._path is not None:
            # Begins with a line end: the last line of a process that was killed may have none.
            with open_log(self._path) as file, written(self._path):
                file.write(b"\n" + json.dumps(record).encode())

    def _read(self, path: Path) -> None:
        for line in path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:  # an empty line, or half of one
                continue
            if path == self._path:
                self.requests += 1
                self.tokens += record.get("tokens", 0)
            if "request" in record:
                self.known.setdefault(record["request"], record["answer"])


@dataclass(slots=True)
class Shared:
    """A request that is under way, and how many wait for it."""

    task: "asyncio.Future[str]"
    waiting: int = 0


class Endpoint:
    """The client of one judge in one worker."""

    def __init__(self, settings: JudgeArgs, timeout: float, answers: Answers, rank: int, world: int) -> None:
        """Connects to nothing. Raises RewardError if the variable that should hold the key is not set.

        Args:
            timeout: seconds that a call of the reward may take, all of its requests together.
            rank, world: of the process of training that this worker serves, and how many there are: the budget is divided.
        """
        self._settings = settings
        self._timeout = timeout
        self._answers = answers
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._headers: dict[str, str] = {}
        if settings.key_env is not None:
            if not (key := os.environ.get(settings.key_env)):
                raise RewardError(
                    f"rewards: judge: the environment variable {settings.key_env} is not set; set it to the key of the judge"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        budgets = {"budget_requests": settings.budget_requests, "budget_tokens": settings.budget_tokens}
        # By name: the budget of the run, and this process's share of it.
        self._budgets = {
            name: (whole, whole // world + (rank < whole % world)) for name, whole in budgets.items() if whole is not None
        }
        self._at_once = asyncio.Semaphore(settings.concurrency)
        self._under_way: dict[str, Shared] = {}  # by the hash of the request

    async def ask(self, question: str) -> str:
        """Returns the answer to a question: the one that was given before, or a new one. Raises NoAnswer if the server refuses,
        fails in every attempt or does not answer in time, or the budget is spent.
        """
        settings = self._settings
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        body = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": question}],
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
            **(settings.extra or {}),
        }
        body = {name: value for name, value in body.items() if value is not None}
        request = hashlib.sha256(json.dumps([settings.url, body], sort_keys=True).encode()).hexdigest()
        if request in self._answers.known:
            return self._answers.known[request]
        # Another completion of the same text may be waiting for the same answer.
        shared = self._under_way.get(request)
        if shared is None:
            shared = self._under_way[request] = Shared(asyncio.ensure_future(self._fetch(request, body)))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                shared.task.cancel()  # without an effect once it is done
                del self._under_way[request]

    async def _fetch(self, request: str, body: dict[str, Any]) -> str:
        """Sends a request until it is answered. Raises NoAnswer."""
        deadline, pause = time.monotonic() + RESERVE * self._timeout, FIRST_PAUSE
        attempts = self._settings.retries + 1
        for attempt in range(1, attempts + 1):
            failed: Passing
            async with self._at_once:
                self._check_budget()
                self._answers.requests += 1
                left = deadline - time.monotonic()
                try:
                    async with asyncio.timeout(min(left, self._settings.request_timeout or left)):
                        answer, tokens = await self._post(body)
                    self._answers.keep(request, answer, tokens)
                    return answer
                except TimeoutError:
                    failed = Passing("no answer in time")
                except Passing as error:
                    failed = error
                except (NoAnswer, asyncio.CancelledError) as error:  # another comparison of the group failed: it was sent
                    self._answers.write({"failed": str(error) or "given up"})
                    raise
            self._answers.write({"failed": str(failed)})
            wait = max(failed.wait, pause * random.uniform(0.5, 1.0))  # not all at once; no result depends on it
            pause = min(2 * pause, LONGEST_PAUSE)
            if attempt == attempts or time.monotonic() + wait >= deadline:
                break
            await asyncio.sleep(wait)
        times = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        raise NoAnswer(f"the judge did not answer in {times}; the last: {failed}")

    async def _post(self, body: dict[str, Any]) -> tuple[str, int]:
        """Sends a request once. Returns the answer's text, and the tokens that it cost; 0 if the server does not say.

        Raises:
            Passing: another attempt may succeed.
            NoAnswer: no attempt can, or the response is not an answer.
        """
        from aiohttp import ClientError, ClientSession, ClientTimeout

        try:
            # A session for each request: a connection that is kept may be closed by the server between two steps. Redirects are
            # not followed, so that the key goes nowhere else.
            async with (
                ClientSession(headers=self._headers, timeout=ClientTimeout(total=None)) as session,
                session.post(self._url, json=body, allow_redirects=False) as response,
            ):
                text = await response.text(errors="replace")
                status, asked = response.status, response.headers.get("Retry-After", "")
        except (ClientError, OSError) as error:
            raise Passing(f"{type(error).__name__}: {error}") from error
        said = redact_and_shorten(" ".join(text.split()), SHOWN)
        if status in PASSING or status >= 500:
            raise Passing(f"HTTP {status}: {said}", float(asked) if asked.isdecimal() else 0.0)
        if status != 200:
            raise NoAnswer(f"the judge refused with HTTP {status}: {said}")
        try:
            reply = json.loads(text)
            answer, usage = reply["choices"][0]["message"]["content"], reply.get("usage") or {}
            tokens = int(usage.get("total_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise NoAnswer(f"the judge sent no chat completion ({type(error).__name__}: {error}): {said}") from error
        if not isinstance(answer, str):
            raise NoAnswer(f"the judge sent an answer without a text: {said}")
        return answer, tokens

    def _check_budget(self) -> None:
        """Raises NoAnswer if the requests or the tokens of the run are spent."""
        spent = {"budget_requests": self._answers.requests, "budget_tokens": self._answers.tokens}
        for name, (whole, budget) in self._budgets.items():
            if spent[name] >= budget:
                share = "" if whole == budget else f", of which this process has {budget}"
                raise NoAnswer(f"{name} {whole} is spent{share}; raise it, or set on_error to skip")
