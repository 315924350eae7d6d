"""Trains recipes one after another in each process that torchrun starts: path_worker.py RECIPE...

With vLLM in the process only the last one may: vLLM closes the process groups with its engine.
"""

import sys
from pathlib import Path

from helpers.in_processes import train_in

from rlgen.processes import Processes
from rlgen.recipe import load_recipe

if __name__ == "__main__":
    processes = Processes.open(300)
    for path in map(Path, sys.argv[1:]):
        train_in(path.with_suffix(""), load_recipe(path), processes)
    processes.close()
