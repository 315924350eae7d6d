"""Measures what a start costs with one million rows: the first time, and when the cache has them.

    python scripts/scale_data.py --rows 1000000

Each start is a process of its own: it reads the data set, makes the prompts or finds them, and takes the prompts of two steps.
Its memory is compared with that of a start with a data set of one row.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pyarrow.parquet

MIB = 2**20
ROWS_AT_A_TIME = 10_000
START = """
import json, sys, time
began = time.monotonic()
import datasets, pyarrow, torch, transformers
from rlgen.data import build_prompts, load_rows
from rlgen.models.tiny import byte_tokenizer
from rlgen.recipe.models import DataRecipe
tokenizer = byte_tokenizer()
imported = time.monotonic()
data = DataRecipe.model_validate(json.loads(sys.argv[1]))
prompts = build_prompts(data, load_rows(data, 0), tokenizer, 0)
opened = time.monotonic()
for step in range(2):
    taken = prompts.take(512 * step, 512)
ended = time.monotonic()
status = open("/proc/self/status").read()
peak, own = (int(status.split(name)[1].split()[0]) * 1024 for name in ("VmHWM:", "RssAnon:"))
print(json.dumps([imported - began, opened - imported, ended - opened, peak, own, prompts.counts["used"], prompts.digest]))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """What one start took.

    Start(imports=6.1, opens=2.0, takes=0.1, peak=681574400, own=330301440, used=1000000, digest="9f86d081884c7d65")
    """

    imports: float  # seconds, of Python modules
    opens: float  # seconds, from the data set to prompts
    takes: float  # seconds, of 1024 prompts
    peak: int  # bytes of memory, the largest of the process; pages of the cache that it has touched count, though all share them
    own: int  # bytes at the end that are this process's alone
    used: int  # rows
    digest: str

    @property
    def seconds(self) -> float:
        """Of the whole start."""
        return self.imports + self.opens + self.takes


@dataclass(frozen=True, slots=True)
class Measured:
    """A first and a second start with many rows, and one with a single row."""

    first: Start
    second: Start
    single: Start

    @property
    def above(self) -> int:
        """Bytes that the second start takes more than one with a single row."""
        return self.second.peak - self.single.peak


def write_rows(path: Path, count: int) -> None:
    """Writes rows of a question and its answer, as JSON Lines or Parquet by the name of the file."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(question(index)) + "\n" for index in range(count))
        return
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, count, ROWS_AT_A_TIME):
            some = [question(index) for index in range(start, min(start + ROWS_AT_A_TIME, count))]
            writer.write_table(pyarrow.Table.from_pylist(some, schema=schema))


def question(index: int) -> dict[str, str]:
    """A row as long as those of GSM8K."""
    text = (
        f"Natalia sold {index} clips to her friends in April, and then she sold {index % 97} fewer clips in May. How many did"
        " she sell altogether in April and May?"
    )
    sold = index - index % 97
    return {"question": text, "answer": f"In May she sold {index} - {index % 97} = {sold} clips.\n#### {index + sold}"}


def start(path: Path, cache: Path) -> Start:
    """Opens the data set in a process of its own."""
    data = {"source": str(path), "columns": {"prompt": "question", "answer": "answer"}, "chat": True, "max_prompt_tokens": 1024}
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(data)],
        env={**os.environ, "HF_DATASETS_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Start(*json.loads(done.stdout.splitlines()[-1]))


def measure(count: int, suffix: str, folder: Path) -> Measured:
    """Starts with `count` rows twice, in an empty cache, and with one row.

    Args:
        suffix: ".jsonl" or ".parquet".
        folder: takes the rows and the cache.
    """
    many, one, cache = folder / f"many{suffix}", folder / f"one{suffix}", folder / "cache"
    write_rows(many, count)
    write_rows(one, 1)
    single = start(one, cache)
    first, second = start(many, cache), start(many, cache)
    if (first.used, first.digest) != (count, second.digest):
        raise SystemExit(f"the second start has other prompts than the first: {second} {first}")
    return Measured(first, second, single)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--format", choices=("jsonl", "parquet"), nargs="+", default=["jsonl"])
    arguments = parser.parse_args()
    for name in arguments.format:
        with TemporaryDirectory() as folder:
            measured = measure(arguments.rows, f".{name}", Path(folder))
        for label in ("first", "second", "single"):
            print(f"{name} {label}: {asdict(getattr(measured, label))}", flush=True)
        print(
            f"{name}, {arguments.rows} rows: first start {measured.first.seconds:.1f} s, second {measured.second.seconds:.1f} s"
            f" (imports {measured.second.imports:.1f} s) and {measured.above / MIB:.0f} MiB more than with one row, of which"
            f" {(measured.second.own - measured.single.own) / MIB:.0f} MiB are not pages of the cache",
            flush=True,
        )


if __name__ == "__main__":
    main()
