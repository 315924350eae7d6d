"""Puts the weights of a sharded checkpoint together, in one process, after the run: a folder that any tool opens."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlgen.models.load import WEIGHT_SHARDS, load_config
from rlgen.models.vision import reads_images
from rlgen.run.manifest import NAME
from rlgen.run.state import whole_shards


@contextmanager
def whole_checkpoint(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """Yields a folder that `from_pretrained` opens: `checkpoint`, or, if its weights are in shards, `folder` with all of them.

    `folder` is then written, and removed after the block. Holds the whole model in memory. Compares no hashes.
    """
    if not (checkpoint / WEIGHT_SHARDS).is_dir():
        yield checkpoint
        return
    try:
        config = load_config(str(checkpoint), None)
        kind = AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM
        with torch.device("meta"):  # only names and layout are asked of it
            model = kind.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder, state_dict=whole_shards(checkpoint / WEIGHT_SHARDS))
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("state", NAME), dirs_exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
