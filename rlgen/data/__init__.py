"""Data sets to prompts."""

from rlgen.data.prompts import PromptStream, build_prompts, listed
from rlgen.data.source import Rows, load_rows

__all__ = ["PromptStream", "Rows", "build_prompts", "listed", "load_rows"]
