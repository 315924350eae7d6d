"""Two processes that ask one vLLM server, which is killed under them: by torchrun, from `test_server_runs.py`.

servers_worker.py FOLDER     leaves what each process was answered, phase by phase, in FOLDER/RANK.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from conftest import RECIPE, tiny_model
from helpers.engines import kill, recoveries

from rlgen.engines.open import build_engine
from rlgen.engines.server import ServerEngine
from rlgen.errors import RlgenError
from rlgen.models.load import locate
from rlgen.models.weights import checkpoint_tensors
from rlgen.processes import EngineShare, Processes
from rlgen.recipe import load_recipe
from rlgen.types import Completion, Request, Sampling, ids_of

TIMEOUT = 8.0  # that one process waits for another: a start of the server takes longer
SAMPLING = Sampling(max_tokens=96, temperature=1.0, stop_ids=tuple(range(240, 258)))
REQUESTS = [Request(prompt_ids=ids_of(range(3, 5 + place % 7)), seed=1000 + place) for place in range(48)]


def bits(answers: Sequence[Completion]) -> list[object]:
    return [[list(map(int, one.token_ids)), list(map(float, one.logp)), one.weight_version] for one in answers]


def main(folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + "engine: {kind: server, launch: true, restarts: 2, max_model_len: 128, max_num_seqs: 8}\n")
    recipe = load_recipe(path, []).recipe
    processes = Processes.open(TIMEOUT)
    said: list[str] = []
    engine = build_engine(recipe.engine_needs, locate(recipe.model.path), processes, folder, said.append)
    assert isinstance(engine, ServerEngine)
    share = list(EngineShare.of(processes, 1).share(REQUESTS))
    found: dict[str, object] = {}

    def step(requests: Sequence[Request], killer: int | None) -> list[object]:
        """What this process is answered; process `killer` kills the server when it has five answers."""
        pool = engine._keeper._pool
        family = processes.on_main(lambda: [one.pid for server in pool._processes.values() for one in server.processes()])
        came: list[int] = []

        def finished(place: int, answer: Completion) -> None:
            came.append(place)
            if killer == processes.rank and len(came) == 5:
                kill(psutil.Process(pid) for pid in family if psutil.pid_exists(pid))

        answers = processes.run_all(lambda: engine.generate(requests, SAMPLING, finished), keepalive=True)
        assert len(came) == len(set(came)) == len(requests), "none was asked twice"
        return bits(answers)

    receipt = processes.run_all(lambda: engine.sync(checkpoint_tensors(tiny_model("qwen3")), 1))
    found["receipt"] = [receipt.version, len(receipt.received), engine.weight_version]
    found["undisturbed"] = step(share, None)
    found["killed by process 1"] = step(share, 1)
    # The main process asks for nothing, and waits for the others already.
    found["killed while the main process waits"] = step(share if processes.rank else [], 1)
    found["recoveries"] = processes.gather([recoveries(engine)])
    try:
        step(share, 1)
    except RlgenError as error:
        found["error"] = [type(error).__name__, error.exit_code, str(error)]
    (folder / f"{processes.rank}.json").write_text(json.dumps({**found, "said": said}))
    engine.close()
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
