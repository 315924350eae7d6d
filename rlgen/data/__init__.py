"""Data sets to prompts."""

from rlgen.data.prompts import PromptStream, build_prompts, listed
from rlgen.data.source import Rows, cached_rows, load_rows

__all__ = ["PromptStream", "Rows", "build_prompts", "cached_rows", "listed", "load_rows"]
