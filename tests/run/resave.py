"""Two processes: a checkpoint into sharded weights, and out of them. resave.py CHECKPOINT FOLDER"""

import sys
from pathlib import Path

from helpers.train_state import parts, save_parts

from rlgen.processes import Processes
from rlgen.run.checkpoint import Checkpoints, load_checkpoint


def main(checkpoint: Path, folder: Path) -> None:
    processes = Processes.open(60)
    own = parts(sharded_by=processes)
    load_checkpoint(checkpoint, *own, processes.rank)
    save_parts(Checkpoints(folder, 1, processes), 2, own)
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
