"""Trains recipes one after another in each process that torchrun starts: path_worker.py RECIPE...

With vLLM in the process only the last one may: vLLM closes the process groups with its engine.
"""

import sys
from pathlib import Path

from rlgen.processes import Processes
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.signals import StopRequest
from rlgen.setup.trainer import RunContext, open_trainer

if __name__ == "__main__":
    processes = Processes.open(300)
    for path in map(Path, sys.argv[1:]):
        loaded = load_recipe(path)
        if processes.is_main:
            RunDirectory.create(path.with_suffix(""), loaded.text, dump_recipe(loaded.recipe)).close()
        processes.gather([None])
        console = Console(2, quiet=not processes.is_main)
        directory = RunDirectory.join(path.with_suffix(""))
        trainer, done = open_trainer(RunContext(recipe=loaded.recipe, directory=directory, console=console, processes=processes))
        trainer.run(done, StopRequest(launched=True))
        trainer.close()
    processes.close()
