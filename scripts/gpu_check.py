"""`make gpu-check`: what only a GPU can show, in one table.

    python scripts/gpu_check.py                        # tier 1; needs one CUDA device, exit 3 without
    python scripts/gpu_check.py --tier 2               # what needs vLLM
    python scripts/gpu_check.py --rows update,memory   # some of the rows of any tier
    python scripts/gpu_check.py --rows checkpoint --model FOLDER   # on real weights
    python scripts/gpu_check.py --rehearse             # small sizes on the CPU: shows that the rows run, nothing about a GPU

Tier 1 needs torch and what each row says in `gpu_rows/rows.py`, no vLLM and no network: eleven minutes at most. A row whose
packages are missing is left out, with a line. Each row is a process of its own with a time limit: one that fails or hangs leaves
the others alone. Exit 1 if a row failed.

All that was found is in the file of `--out`. `rlgen docs numbers` shows a copy in `scripts/gpu_measured/`, after `make docs`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from gpu_rows.record import Place, Row
from gpu_rows.rows import ROWS
from gpu_rows.running import ROOT, Runner, absent, commit, dependencies, report, table

OUT = ROOT / "runs" / "gpu-check.json"
FEW = 660  # seconds of tier 1
MANY = 3600  # of the others, which compile kernels


def chosen_rows(tier: int, names: list[str] | None) -> list[Row]:
    """Returns the rows of a tier, or those of these names, in their order. Raises ValueError for a name that no row has."""
    if names is None:
        return [row for row in ROWS if row.tier == tier]
    known = [row.name for row in ROWS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--rows: there is no row {unknown[0]!r}; there are {', '.join(known)}")
    return [row for row in ROWS if row.name in names]


def inside(name: str, place: str, answer: Path) -> None:
    """Runs one row in this process and writes what it found."""
    row = next(row for row in ROWS if row.name == name)
    finding = row.check(Place(**json.loads(place)))
    aside = answer.with_suffix(".part")
    aside.write_text(json.dumps(asdict(finding)))
    aside.rename(answer)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rows", metavar="A,B", help="these rows, of any tier, instead of a tier")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON with all numbers (runs/gpu-check.json)")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--model", metavar="FOLDER", help="a real checkpoint, for the row of that name (RLGEN_REAL_MODEL)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of all rows together (tier 1: 660, else 3600)")
    parser.add_argument("--commit", help="goes into the JSON where there is no git")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside, arguments.place, arguments.answer)
        return 0
    try:
        rows = chosen_rows(arguments.tier, arguments.rows and [name.strip() for name in arguments.rows.split(",")])
    except ValueError as error:
        parser.error(str(error))
    if absent(["torch"]):
        print("gpu-check needs torch, which is not installed here", file=sys.stderr)
        return 3
    sys.path.insert(0, str(ROOT))  # a machine that only lends its GPU has not installed rlgen
    import torch
    from gpu_rows.measure import device_name

    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none; --rehearse runs its rows on the CPU", file=sys.stderr)
        return 3
    limit = arguments.limit or (FEW if all(row.tier == 1 for row in rows) and not arguments.rehearse else MANY)
    out = arguments.out.resolve()
    with tempfile.TemporaryDirectory(prefix="rlgen-check-") as folder:
        model = arguments.model or os.environ.get("RLGEN_REAL_MODEL")
        place = Place(folder=folder, gpu=not arguments.rehearse, model=model)
        logs = out.with_name(f"{out.stem}-logs")
        runner = Runner(program=Path(__file__).resolve(), place=place, logs=logs, until=time.perf_counter() + limit)
        name = device_name(place.device)
        print(f"device: {name}; torch {torch.__version__}" + ("; a rehearsal on the CPU" if arguments.rehearse else ""))
        if missing := absent(dependencies()):
            print(f"of rlgen's packages these are not installed here, and rows that need them are left out: {', '.join(missing)}")
        found = []
        for row in rows:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            found.append((row, runner.run(row)))
            # After each row: what was measured is kept if this process is killed.
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report(found, place, name, arguments.commit or commit()), indent=1) + "\n")
    print(table(found))
    if arguments.rehearse:
        print("a rehearsal on the CPU: it shows that the rows run, nothing about a GPU")
    print(f"all numbers: {out}")
    return int(any(finding.status == "failed" for _, finding in found))


if __name__ == "__main__":
    sys.exit(main())
