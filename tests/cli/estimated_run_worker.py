"""Trains a recipe, and writes the peak of each process's memory: estimated_run_worker.py OUTPUT RECIPE FOLDER KEY=VALUE..."""

import os
import sys
from pathlib import Path

import torch
from helpers.anonymous import watched
from helpers.in_processes import train_in

from rlgen.files import write_json
from rlgen.processes import Processes
from rlgen.recipe import load_recipe


def main(output: Path, recipe: Path, folder: Path, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    processes, found = Processes.open(60) if "RANK" in os.environ else Processes.alone(), dict[str, int]()
    with watched(found):
        train_in(folder, load_recipe(recipe, overrides), processes)
    peaks = processes.gather([found["peak"]])
    if processes.is_main:
        write_json(output, peaks)
    processes.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
