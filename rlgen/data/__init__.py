"""Reads data sets and turns their rows into tokenised prompts; owns the cache of converted tables."""

from rlgen.data.images import Placeholder
from rlgen.data.prompts import PromptStream, build_prompts, listed, overlap, warnings_of
from rlgen.data.source import Rows, cached_rows, load_rows

__all__ = ["Placeholder", "PromptStream", "Rows", "build_prompts", "cached_rows", "listed", "load_rows", "overlap", "warnings_of"]
