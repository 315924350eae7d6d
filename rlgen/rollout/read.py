"""Reads `rollouts/step_000012.parquet`, the samples of a step. Needs neither torch nor transformers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlgen.errors import CheckpointError
from rlgen.rollout.parquet import UNREADABLE, as_json, parts_of, read_part
from rlgen.rollout.samples import Samples


def rollout_steps(folder: Path) -> list[int]:
    """Returns the steps whose rollouts are in a folder, in ascending order."""
    names = (path.name.removeprefix("step_").removesuffix(".parquet") for path in folder.glob("step_*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


def rollouts_of(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step_{step:06d}.parquet"


def processes_of(run: Path, step: int) -> int:
    """Returns how many processes have written the rollouts of a step; 0: they are not there."""
    return len(parts_of(rollouts_of(run, step)))


def read_rollouts(place: Path, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns the samples of a step, ordered by group and by sample within a group.

    If the run was killed, rows of some processes may be missing. Raises CheckpointError if there are none, or a file is damaged.

    Args:
        place: a run's folder; or, without a step, the file or folder of one step.
        columns: names of the columns to read, as far as the files have them; None: all.
    """
    path = place if step is None else rollouts_of(place, step)
    tables = []
    for part in parts_of(path):
        try:
            with pq.ParquetFile(part, page_checksum_verification=True) as file:
                known = file.schema_arrow.names
                wanted = known if columns is None else [name for name in known if name in columns]
                tables.append(file.read(columns=wanted).replace_schema_metadata(None))
        except UNREADABLE as error:
            raise unreadable(part, error) from error
    if not tables:
        raise CheckpointError(
            f"{path} does not exist: no process has written these rollouts; rollouts.every in the recipe sets which are written"
        )
    if len(tables) == 1:
        return tables[0]  # rows of one file are in order already
    joined = pa.concat_tables(as_one_kind(tables), promote_options="permissive")
    return joined.sort_by([("group_id", "ascending"), ("sample_index", "ascending")])


def from_rollouts(run: Path, step: int, rank: int | None = None) -> Samples | None:
    """Returns the samples of a step, ordered by group and by sample: those of the process `rank`, or of all. None if its rollouts
    are missing or damaged, or it was trained with experts of the engine (`model.route_replay`), which only the journal has.
    """
    parts = [read_part(part) for part in parts_of(rollouts_of(run, step))[rank : None if rank is None else rank + 1]]
    found = [part[0] for part in parts if part is not None]
    if not found or len(found) < len(parts) or any(part[1].get("experts") for part in parts if part is not None):
        return None
    samples = Samples.join(found)
    return samples.take(np.lexsort((samples.sample_index, samples.group_id)))


def metadata_of(part: Path) -> pq.FileMetaData:
    """Returns the metadata of a file of rollouts. Raises CheckpointError if it is damaged."""
    try:
        return pq.read_metadata(part)
    except UNREADABLE as error:
        raise unreadable(part, error) from error


def unreadable(part: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{part} cannot be read ({error}); it is damaged: remove it, or restore it from a copy")


def as_one_kind(tables: Sequence[pa.Table]) -> Sequence[pa.Table]:
    """Returns the tables with equal column types: a column whose types cannot be unified becomes JSON text in all of them."""
    try:
        pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
        return tables
    except pa.ArrowException:
        kinds = {(one.name, one.type) for table in tables for one in table.schema}
        clashing = [name for name, count in Counter(name for name, _ in kinds).items() if count > 1]
        return [as_json(table, clashing) for table in tables]
