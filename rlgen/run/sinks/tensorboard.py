"""TensorBoard: event files, written without torch and tensorflow."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlgen.recipe.sinks import TensorboardSink
from rlgen.run.sinks.tracker import Numbers, Opening, Table


class TensorboardTracker:
    """A folder of event files, one for each attempt of a run. Numbers have 32 bits there."""

    def __init__(self, sink: TensorboardSink, opening: Opening) -> None:
        folder = Path(sink.folder) / opening.name if sink.folder else Path(opening.folder) / "tensorboard"
        self.id = str(folder)  # an attempt that goes on adds a file to it
        self.writer = EventFileWriter(self.id)
        # Readers drop what an earlier attempt wrote of steps from this one on: they are trained again.
        self._write(opening.step + 1, session_log=SessionLog(status=SessionLog.START))
        for name, facts in opening.config.items():
            self._text(name, opening.step, [[json.dumps(facts, indent=2, ensure_ascii=False)]])

    def _write(self, step: int, session_log: SessionLog | None = None, summary: Summary | None = None) -> None:
        self.writer.add_event(Event(wall_time=time.time(), step=step, session_log=session_log, summary=summary))
        self.writer.flush()

    def _text(self, tag: str, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Writes a table of texts. Each is a block of code: otherwise it would be shown as Markdown."""
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(rows)), TensorShapeProto.Dim(size=len(rows[0]))])
        codes = ["    " + cell.replace("\n", "\n    ") for row in rows for cell in row]
        cells = [code.encode("utf-8", "replace") for code in codes]
        value = Summary.Value(
            tag=tag,
            metadata=create_summary_metadata(display_name=tag, description=""),
            tensor=TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=cells),
        )
        self._write(step, summary=Summary(value=[value]))

    def metrics(self, step: int, numbers: Numbers) -> None:
        self._write(step, summary=Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]))

    def samples(self, step: int, table: Table) -> None:
        rows = [["" if cell is None else str(cell) for cell in row] for row in table.rows]
        self._text("samples", step, [table.columns, *rows])

    def end(self, state: str, exit_code: int) -> None:
        self._text("state", 0, [[f"{state}, exit code {exit_code}"]])
        self.writer.close()
