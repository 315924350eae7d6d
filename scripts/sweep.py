"""`make sweep`: is a small random model of every type that transformers has served right, or refused with one sentence?

    python scripts/sweep.py                          # what scripts/sweep.json lacks, with each engine
    python scripts/sweep.py falcon opt --again       # these again
    python scripts/sweep.py --engine transformers    # with one engine only

Each model is opened as a run opens it, in a process of its own: trainer and engine, float32, with all checks of the sentinel.
Then plain transformers, with its own logits, scores the same completions: rlgen's code has no part in it.
Results are written as they come, so that a sweep can be stopped and resumed. Exits with 1 if one of them is a defect: an error
that is no sentence, a process that died or hung, or log-probs that differ from those of plain transformers.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from shrink import model_names, small_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlgen.engines import vllm_compat
from rlgen.errors import RlgenError
from rlgen.models.tiny import byte_tokenizer, save_random, special_ids
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.sentinel.probe import FEWER_TOKENS
from rlgen.sentinel.rungs import climb
from rlgen.sentinel.verdict import failed
from rlgen.setup.data import open_data
from rlgen.setup.probe import probe_of, toy_gradient
from rlgen.setup.trainer_and_engine import open_trainer_and_engine
from rlgen.types import WHOLE, Sample

TABLE = Path(__file__).parent / "sweep.json"
ENGINES = ("transformers", "colocated")
BOUND = 1e-4  # nats: plain transformers and the engine, any sampled token
SECONDS, GIB = 240, 1 << 30
MEMORY = 12 * GIB  # address space of a process
LARGEST = 20_000_000  # parameters; a larger model was not shrunk

# Plain transformers computes with eager attention; but that of Falcon adds ALiBi twice, once by the mask (transformers 5.19).
PLAIN = {"falcon:alibi": "sdpa"}

Result = dict[str, Any]


def recipe_for(folder: Path, engine: str) -> Recipe:
    """Returns a recipe whose prompts and completions are longer than the windows of the small models."""
    return Recipe.model_validate(
        {
            "run": {"name": "sweep"},
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"source": "task:sort", "chat": True, "max_prompt_tokens": 128},
            "rewards": [{"use": "exact_match"}],
            "rollout": {"prompts_per_step": 8, "group_size": 2, "max_completion_tokens": FEWER_TOKENS},
            "engine": {"kind": engine},
        }
    )


def build(name: str, folder: Path) -> None:
    """Writes a small random model of a type, with a byte-level tokenizer, into `folder`."""
    tokenizer = byte_tokenizer()
    config = small_config(name, {"vocab_size": len(tokenizer), **special_ids(tokenizer)})
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters are left of it")
    save_random(config, tokenizer, folder)


def examine(folder: Path, engine: str, attention: str = "eager") -> Result:
    """Opens both sides, runs all checks of the sentinel and compares the engine with plain transformers.

    Args:
        attention: of plain transformers.

    Raises:
        RlgenError: rlgen refuses the model.
    """
    recipe = recipe_for(folder, engine)
    data = open_data(recipe)
    with closing(open_trainer_and_engine(data, None, Processes.alone(), folder, print)) as both:
        probe = probe_of(both)
        rungs = list(climb(probe, toy_gradient(both, probe)))
        wrong = failed(rungs)
        if wrong is not None:
            raise wrong.error()
        samples = probe.sample(WHOLE, FEWER_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    plain = max(apart(model, sample) for sample in samples)
    changed = next(rung for rung in rungs if rung.number == 3)
    if not plain <= BOUND:
        return {"outcome": "defect", "said": f"log-probs differ by {plain:.2g} nats from those of plain transformers"}
    gap = max(next(iter(rung.measured.values())) for rung in rungs if rung.number in (1, 3))
    return {"outcome": "healthy", "gap": gap, "plain": plain, "power": changed.power}


@torch.no_grad()
def apart(model: Any, sample: Sample) -> float:
    """Returns the largest difference between a completion's log-probs and those that plain transformers computes."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(sample.completion_ids).long()[:, None])[:, 0]
    return (own - torch.from_numpy(sample.sampler_logp).double()).abs().max().item()


def outcome(work: Callable[[], Result]) -> Result:
    """Returns what `work` finds, or how it ends: an error of rlgen is a refusal, any other is a defect."""
    try:
        return work()
    except RlgenError as error:
        lines = str(error).splitlines()
        kind = "refused" if error.exit_code in (3, 6) and len(lines) == 1 else "defect"
        return {"outcome": kind, "exit": error.exit_code, "said": lines[0]}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(place.filename).name}:{place.lineno}"
        return {"outcome": "defect", "exit": 70, "said": f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({at})"}


def of_model(name: str, engine: str, log: Path) -> Result:
    """Builds a model and examines it, with everything that is printed in `log`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        try:
            build(name, folder)
        except Exception as error:  # the code of any architecture may refuse the small config in its own way
            return {"outcome": "not built", "said": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        found = outcome(lambda: examine(folder, engine, PLAIN.get(name, "eager")))
        return found | {"said": found["said"].replace(str(folder), "FOLDER")} if "said" in found else found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def apart_from_here(name: str, engine: str, log: Path) -> Result:
    """Runs `of_model` in a process of its own, forked from this one, which has imported everything already."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        send.send(of_model(name, engine, log))
        os._exit(0)  # what vLLM leaves behind would wait for this process to end

    process = context.Process(target=work)
    process.start()
    send.close()
    try:
        if not receive.poll(SECONDS):
            process.kill()
            return {"outcome": "defect", "said": f"no result after {SECONDS} s"}
        found: Result = receive.recv()
        return found
    except EOFError:
        process.join()
        return {"outcome": "defect", "said": f"the process died (exit code {process.exitcode})"}
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="model types, or forms of one such as falcon:alibi; all if none is named")
    parser.add_argument("--engine", choices=ENGINES, help="one engine instead of both")
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()) / "rlgen-sweep", help="folder of what is printed"
    )
    chosen = parser.parse_args()
    chosen.logs.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, Result]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for engine in [chosen.engine] if chosen.engine else ENGINES:
        if engine == "colocated":
            with vllm_compat.process_kept_as_is():
                vllm_compat.import_vllm()
        for name in chosen.names or model_names():
            if chosen.again or engine not in table.get(name, {}):
                found = apart_from_here(name, engine, chosen.logs / f"{name}-{engine}.log")
                table.setdefault(name, {})[engine] = found
                TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
                print(f"{name} {engine}: {found['outcome']} {found.get('said', '')}", flush=True)
    defects = [name for name, found in table.items() if any(one["outcome"] == "defect" for one in found.values())]
    if defects:
        sys.exit(f"defects: {', '.join(defects)}")


if __name__ == "__main__":
    main()
