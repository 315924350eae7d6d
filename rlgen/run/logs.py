"""Redirects the log output of libraries to a file of the run, with secrets removed."""

import logging
import warnings
from pathlib import Path

from rlgen.errors import redacted
from rlgen.files import LogFile


class Redacting(logging.Formatter):
    """Formats log lines with secrets removed.

    A filter on the root logger would not see tracebacks, nor records that other loggers pass to its handlers.
    """

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_to(path: Path) -> None:
    """Redirects logs and warnings of libraries from the screen to the file at `path`."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, logging.FileHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
