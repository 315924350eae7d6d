"""Keeps the answers of a judge, in memory and in a folder of the run: the same request gets the same answer, also after a resume.

One file for each judge and process of training, one line for each request that was sent:

{"request": "SHA-256", "answer": "Score: 7", "tokens": 321}     an answer
{"failed": "HTTP 503"}                                           no answer; it counts as a request, too
"""

import json
from pathlib import Path

from rlgen.files import open_log, written


class Answers:
    """The answers of one judge so far."""

    def __init__(self, folder: Path | None, name: str, rank: int) -> None:
        """Reads what the processes of training and of earlier attempts have written.

        Args:
            folder: None: answers are kept in memory only.
            name: of the judge, without @.
            rank: of the process of training that this one serves.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self.requests = self.tokens = 0  # sent and paid by this process, earlier attempts included
        self._known: dict[str, str] = {}
        self._path = None if folder is None else folder / f"{name}@{rank}.jsonl"
        if folder is None:
            return
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*@*.jsonl")):
                if path.name.rpartition("@")[0] == name:
                    self._read(path)

    def get(self, request: str) -> str | None:
        """Returns the answer to a request, by its hash; None: it was not answered yet."""
        return self._known.get(request)

    def keep(self, request: str, answer: str, tokens: int) -> None:
        """Stores an answer. Raises CheckpointError if it cannot be written."""
        self._write({"request": request, "answer": answer, "tokens": tokens})
        self._known[request] = answer
        self.tokens += tokens

    def lose(self, why: str) -> None:
        """Stores that a request was not answered. Raises CheckpointError if it cannot be written."""
        self._write({"failed": why})

    def _write(self, record: dict[str, str | int]) -> None:
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
                self._known.setdefault(record["request"], record["answer"])
