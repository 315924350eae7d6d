"""A data source to rows, and rows to prompts: templated and tokenised once."""

from rlgen.data.prompts import PromptStream, build_prompts
from rlgen.data.source import Rows, load_rows

__all__ = ["PromptStream", "Rows", "build_prompts", "load_rows"]
