"""How long a save holds the loop up, beside what the whole save takes: 50 M parameters, AdamW, several saves in one run.

`measure` does what a run does: it trains a little, saves, and goes on; each save is waited for before the next. Between the saves
nothing else happens here: what the loop would do beside the writing is not measured.

`torchrun --nproc-per-node 4 scripts/saves.py` measures four processes, each of which saves its shards.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlgen.processes import Processes

MOST = 0.05  # of the whole
SAVES = 5


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """SaveTimes(parameters=50_344_960, held=(0.5, 0.2, ...), whole=(2.4, 2.1, ...)): seconds by save; the first makes room."""

    parameters: int
    held: tuple[float, ...]  # the loop stood still
    whole: tuple[float, ...]  # from the beginning until the checkpoint was complete

    @property
    def share(self) -> float:
        """Of all saves together, the first one too."""
        return sum(self.held) / sum(self.whole)


def measure(folder: Path, saves: int = SAVES, layers: int = 8, processes: Processes | None = None) -> SaveTimes:
    """Writes `saves` checkpoints under `folder`, of which one stays. `processes` save together; None: this one alone."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rlgen.models.tiny import SHAPE, byte_tokenizer
    from rlgen.run.checkpoint import Checkpoints
    from rlgen.types import Position

    disable_progress_bar()
    processes = processes or Processes.alone()
    tokenizer = byte_tokenizer()
    large = {"hidden_size": 640, "intermediate_size": 2560, "num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64}
    config = CONFIG_MAPPING["qwen3"](**SHAPE | large | {"num_hidden_layers": layers, "vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if processes.world > 1:
        for part in (*model.model.layers, model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    checkpoints = Checkpoints(folder, 1, processes, tokenizer=tokenizer)
    held, whole = [], []
    for step in range(1, saves + 1):
        model(torch.randint(0, 256, (1, 8)), labels=torch.randint(0, 256, (1, 8))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        processes.gather([])  # an update of a run ends with an exchange: waiting for a slower one's update is no part of a save
        began = time.perf_counter()
        checkpoints.save(Position(step, step), model, optimizer, schedule)
        held.append(time.perf_counter() - began)
        checkpoints.complete(wait=True)
        whole.append(time.perf_counter() - began)
    held, whole = (list(map(max, zip(*processes.gather([times]), strict=True))) for times in (held, whole))
    return SaveTimes(sum(parameter.numel() for parameter in model.parameters()), tuple(held), tuple(whole))


def main() -> int:
    processes = Processes.open(timeout=600) if "RANK" in os.environ else Processes.alone()
    with tempfile.TemporaryDirectory(prefix="rlgen-saves-") as folder:
        times = measure(Path(processes.gather([folder])[0]), processes=processes)
        processes.gather([])  # the folder stays until all are done
    if processes.world > 1:
        processes.close()
    if not processes.is_main:
        return 0
    print(f"{times.parameters / 1e6:.1f} M parameters, {len(times.held)} saves; seconds, the first one first")
    print("held the loop up  " + "  ".join(f"{seconds:6.3f}" for seconds in times.held))
    print("the whole save    " + "  ".join(f"{seconds:6.3f}" for seconds in times.whole))
    shares = [held / whole for held, whole in zip(times.held, times.whole, strict=True)]
    print("share             " + "  ".join(f"{share:6.1%}" for share in shares))
    print(f"saves: the loop is held up for {times.share:.1%} of what they take (median {median(shares):.1%}); at most {MOST:.0%}")
    return int(times.share > MOST)


if __name__ == "__main__":
    sys.exit(main())
