"""The sides of `make bench`, each in its own process: rlgen with colocated vLLM; rlgen with `rollout.stream` and a server that it
launches; TRL 1.16.0 with colocated vLLM; and the sequential floor.

    python scripts/bench_sides.py rlgen longtail FOLDER

Each side trains step after step until it is killed, and prints a line before each step: the tokens that it was trained on and the
seconds of each phase of the step before. Then it waits for a byte. `scripts/bench.py` lets one side run at a time, a step of each
in turns.

All sides get the same model, prompts, reward, number of completions, sampling and optimizer. A random model would end its answers
anywhere, and differently on each side; so vLLM is told the length of each completion, by a patch of vLLM, or of
what rlgen asks a server: the i-th request of a step ends after `Workload.lengths[i]` tokens, and not before.
"""

import gc
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import yaml

from rlgen.heap import importing
from rlgen.metrics import Metric

if TYPE_CHECKING:  # each side imports what it needs, as that is part of the time of its start
    import torch

    from rlgen.trainers.collect import Collector
    from rlgen.types import Request, Sampling

LEARNING_RATE = 1e-5
ENDLESS = 1_000_000  # steps: the parent ends the process
REWARD = "def reward(completion):\n    return (len(completion) * 2654435761 % 97) / 97\n"


def reward(completion: str) -> float:
    """Returns a number that follows from the length of a text, and differs within a group; `REWARD` is the same, as a file."""
    return (len(completion) * 2654435761 % 97) / 97


def long_tail(number: int, longest: int) -> list[int]:
    """Returns lengths of which most are short and a few are the longest: log-normal, the same each time."""
    draw = random.Random(4242)
    return [min(longest, max(4, round(draw.lognormvariate(4.1, 1.1)))) for _ in range(number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One shape of a step. Workload(prompts=4, group_size=8, prompt_tokens=24, lengths=[64] * 32)"""

    prompts: int
    group_size: int
    prompt_tokens: int
    lengths: Sequence[int]  # of the completions of a step, in the order of prompts
    model: dict[str, int] = field(default_factory=dict)  # where it differs from `tiny.SHAPE`
    micro_batch_tokens: int = 16384  # of rlgen

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest completion."""
        return max(self.lengths)


WORKLOADS = {
    "uniform": Workload(prompts=4, group_size=8, prompt_tokens=24, lengths=[64] * 32),
    "longtail": Workload(prompts=8, group_size=8, prompt_tokens=24, lengths=long_tail(64, 480)),
    "longprompt": Workload(prompts=4, group_size=8, prompt_tokens=400, lengths=[30] * 32),
    "bigvocab": Workload(prompts=4, group_size=8, prompt_tokens=24, lengths=[64] * 32, model={"vocab_size": 151_936}),
    "wide": Workload(
        prompts=4,
        group_size=8,
        prompt_tokens=24,
        lengths=[64] * 32,
        micro_batch_tokens=1100,  # two groups: a larger one takes as long, and twice the memory
        model={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 7,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "head_dim": 64,
        },
    ),
}


def build_model(workload: Workload, folder: Path) -> None:
    """Writes the random model of a workload, with a tokenizer of bytes, into `folder`, unless it is there."""
    if (folder / "config.json").exists():
        return
    from transformers import Qwen3Config

    from rlgen.models.tiny import SHAPE, byte_tokenizer, save_random, special_ids

    tokenizer = byte_tokenizer()
    settings = {**SHAPE, "vocab_size": len(tokenizer), "initializer_range": 0.02, **workload.model}
    save_random(Qwen3Config(**settings, **special_ids(tokenizer), tie_word_embeddings=True), tokenizer, folder)


def prompts_of(workload: Workload, step: int) -> list[str]:
    """Returns the prompts of a step, one character a token."""
    draw = random.Random(f"prompts/{step}")
    return ["".join(draw.choices("abcdefghij ", k=workload.prompt_tokens)) for _ in range(workload.prompts)]


def rows(workload: Workload, steps: int) -> list[dict[str, str]]:
    """Returns the prompts of many steps as rows of a data set."""
    return [{"prompt": prompt} for step in range(steps) for prompt in prompts_of(workload, step)]


@contextmanager
def told_lengths(workload: Workload) -> Iterator[None]:
    """Lets the i-th request of every call of vLLM's `generate` in the block take exactly `workload.lengths[i]` tokens."""
    from rlgen.engines import vllm_compat

    with vllm_compat.process_kept_as_is():
        vllm = vllm_compat.import_vllm()
    with importing():  # as a run imports it
        generate = vllm.LLM.generate

    def told(llm: Any, prompts: Sequence[Any], sampling_params: Any = None, **others: Any) -> Any:
        each = list(sampling_params) if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        if len(each) == len(workload.lengths) and max(one.max_tokens for one in each) == workload.longest:
            each = [one.clone() for one in each]
            for one, length in zip(each, workload.lengths, strict=True):
                one.max_tokens, one.ignore_eos, one.stop_token_ids = length, True, []
                one._all_stop_token_ids = set()
        return generate(llm, prompts, sampling_params=each, **others)

    with patch.object(vllm.LLM, "generate", told):
        yield


@contextmanager
def told_lengths_to_server(workload: Workload) -> Iterator[None]:
    """Does the same for the requests that rlgen sends to a server."""
    from rlgen.engines import server

    generate, body = server.ServerEngine.generate, server.sampling_arguments
    whole = False

    def told(engine: Any, requests: "Sequence[Request]", sampling: "Sampling", *others: Any) -> Any:
        nonlocal whole
        whole = len(requests) == len(workload.lengths) and sampling.max_tokens == workload.longest
        if whole:
            requests = [replace(one, max_tokens=length) for one, length in zip(requests, workload.lengths, strict=True)]
        return generate(engine, requests, sampling, *others)

    def told_body(sampling: "Sampling", held: bool) -> dict[str, Any]:
        return body(sampling, held) | ({"stop_token_ids": [], "ignore_eos": True} if whole else {})

    with patch.object(server.ServerEngine, "generate", told), patch.object(server, "sampling_arguments", told_body):
        yield


class Steps:
    """Prints a line before each step, with what is known of the step before, and then waits for a byte from standard input.

    So the parent can stop the process between two steps, and no phase contains the time for which it was stopped.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.phases: dict[str, list[float]] = {}  # [start, seconds] of each phase of the step so far
        self._out = os.fdopen(os.dup(1), "w")  # a run sends what its process prints elsewhere
        self._in = os.dup(0)

    def begin(self) -> None:
        """Ends the step before and begins one."""
        print(json.dumps(self.said()), file=self._out, flush=True)
        self.tokens, self.phases = 0, {}
        if not os.read(self._in, 1):
            raise SystemExit("the process that lets this one take steps has ended")

    def said(self) -> dict[str, Any]:
        """Returns what is known of the step before."""
        return {"tokens": self.tokens, "phases": self.phases}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as a phase of the step."""
        start = time.time()
        try:
            yield
        finally:
            before = self.phases.setdefault(name, [start, 0.0])
            before[1] += time.time() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, timed as a phase."""

        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return call


def run_rlgen(workload: Workload, folder: Path, steps: Steps, stream: bool = False) -> None:
    """Trains with rlgen, as `rlgen train` does; with `stream`, on groups that are complete while a server samples others."""
    from rlgen.setup.attempt import train
    from rlgen.setup.reopen import TrainOptions

    with importing():  # as a run imports it
        from rlgen.engines import vllm_compat

    (folder / "rewards.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(workload, 200)))
    recipe = {
        "run": {"name": "bench", "steps": ENDLESS},
        "model": {"path": "./model", "dtype": "float32"},
        "data": {"source": "rows.jsonl", "chat": False, "shuffle": False, "max_prompt_tokens": workload.prompt_tokens},
        "rewards": [{"use": "rewards.py:reward"}],
        "scoring": {"workers": 1},
        "rollout": {
            "prompts_per_step": workload.prompts,
            "group_size": workload.group_size,
            "max_completion_tokens": workload.longest,
            "stream": stream,
        },
        "engine": {"kind": "server", "launch": True} if stream else {"kind": "colocated"},
        "trainer": {"kind": "grpo", "loss": "dapo"},
        "optim": {"learning_rate": LEARNING_RATE, "micro_batch_tokens": workload.micro_batch_tokens},
        "checkpoint": {"every": ENDLESS},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    run = folder / "run"
    open_llm = vllm_compat.open_llm
    with ExitStack() as around:

        def opened(*arguments: Any) -> Any:
            around.enter_context(told_lengths(workload))  # not before: a run imports vLLM when it opens the engine
            return open_llm(*arguments)

        if stream:
            around.enter_context(told_lengths_to_server(workload))
        around.enter_context(patch.object(vllm_compat, "open_llm", opened))
        around.enter_context(rlgen_says(steps, run))
        train(path, TrainOptions(run_dir=run, clean=True, progress="plain"))


@contextmanager
def rlgen_says(steps: Steps, run: Path) -> Iterator[None]:
    """Lets the trainer of rlgen say its steps, with what `metrics.jsonl` of the run's folder has of the step before."""
    with importing():  # as a run imports it
        from rlgen.trainers.collect import Collector

    collect, known = Collector.drawing, -1  # step of the newest metrics; -1: this process has trained nothing yet

    def told(collector: "Collector", *arguments: Any) -> Any:
        nonlocal known
        found = newest_metrics(run)
        if known >= 0:
            if found[Metric.STEP] != known + 1:
                raise SystemExit(f"metrics of step {found[Metric.STEP]} where those of {known + 1} should stand")
            steps.tokens = found[Metric.TOKENS_TRAINED]
            now, names = time.time(), ("generate", "reward", "train", "sync", "save")
            took = {name: found.get(f"time/{name}", 0.0) for name in names}
            start = now - sum(took.values())
            for name, seconds in took.items():
                steps.phases[name] = [start, seconds]
                start += seconds
        known = found[Metric.STEP]
        steps.begin()
        return collect(collector, *arguments)

    with patch.object(Collector, "drawing", told):
        yield


def newest_metrics(run: Path) -> dict[str, Any]:
    """Returns the last record of `metrics.jsonl` in the folder of a run; of a run that has trained nothing, step 0 alone."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {Metric.STEP: 0}
    return found


def run_trl(workload: Workload, folder: Path, steps: Steps) -> None:
    """Trains with TRL's GRPOTrainer and vLLM in its process."""
    with told_lengths(workload), trl_survives():
        train_with_trl(workload, folder, steps)


def train_with_trl(workload: Workload, folder: Path, steps: Steps) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

    class Begins(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seen = getattr(state, "num_input_tokens_seen", 0)
            steps.tokens = int(seen) - Begins.seen - (len(workload.lengths) * workload.prompt_tokens if seen else 0)
            Begins.seen = int(seen)
            steps.begin()

        seen = 0

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        max_steps=ENDLESS,
        per_device_train_batch_size=len(workload.lengths),
        gradient_accumulation_steps=1,
        num_generations=workload.group_size,
        max_completion_length=workload.longest,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=workload.prompt_tokens + workload.longest,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=[lambda completions, **columns: [reward(completion) for completion in completions]],
        args=config,
        train_dataset=Dataset.from_list(rows(workload, 200)),
        callbacks=[Begins()],
    )
    sampler = trainer.vllm_generation
    sampler.generate = steps.timed("generate", sampler.generate)
    sampler.sync_weights = steps.timed("sync", sampler.sync_weights)
    trainer.train()


def run_floor(workload: Workload, folder: Path, steps: Steps) -> None:
    """Samples with raw vLLM, then takes one optimizer step on the same tokens without a pad token: the least work of a step.

    Rows whose lengths are within 3 % are cut to the shortest of them and go through the model together; others go alone. The
    weights are not sent to the engine.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlgen.engines import vllm_compat
    from rlgen.models.tiny import byte_tokenizer

    with vllm_compat.process_kept_as_is():
        vllm = vllm_compat.import_vllm()
        llm = vllm.LLM(
            model=str(folder / "model"),
            dtype="float32",
            max_model_len=workload.prompt_tokens + workload.longest,
            max_num_seqs=len(workload.lengths),
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(2048, len(workload.lengths) * workload.prompt_tokens),
            disable_log_stats=True,
        )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    tokenizer = byte_tokenizer()
    for step in count():
        steps.begin()
        prompts = [tokenizer(text)["input_ids"] for text in prompts_of(workload, step) for _ in range(workload.group_size)]
        params = [
            vllm.SamplingParams(temperature=1.0, max_tokens=workload.longest, seed=place, detokenize=False)
            for place in range(len(prompts))
        ]
        with told_lengths(workload), steps.phase("generate"), vllm_compat.process_kept_as_is():
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        whole = [[*ids, *output.outputs[0].token_ids] for ids, output in zip(prompts, outputs, strict=True)]
        with steps.phase("train"):
            for batch in without_padding(whole):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits[:, workload.prompt_tokens - 1 :]
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch[:, workload.prompt_tokens :].flatten(), reduction="sum"
                )
                (loss / sum(workload.lengths)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        steps.tokens = sum(len(row) - workload.prompt_tokens for row in whole)


def without_padding(whole: Sequence[Sequence[int]]) -> "list[torch.Tensor]":
    """Returns the rows as batches [B, S] of rows that are equally long, or were within 3 % of each other."""
    import torch

    batches: list[list[Sequence[int]]] = []
    for row in sorted(whole, key=len):
        if batches and len(row) <= 1.03 * len(batches[-1][0]):
            batches[-1].append(row)
        else:
            batches.append([row])
    return [torch.tensor([row[: len(batch[0])] for row in batch]) for batch in batches]


@contextmanager
def trl_survives() -> Iterator[None]:
    """Lets vLLM keep plain weights on the CPU, as TRL's sync writes into them: where vLLM packs them, it ends with an error.

    And lets it sample from the weights in float32, as the other sides do: for a model in float32, vLLM's own choice is bfloat16.
    """
    from rlgen.engines import vllm_compat

    with vllm_compat.process_kept_as_is():
        vllm = vllm_compat.import_vllm()
        gc.unfreeze()  # TRL does not leave what was imported out of garbage collections
        from vllm.model_executor.layers import utils
    plain: Callable[..., None] = partial(setattr_linear)
    begin = vllm.LLM.__init__

    def in_float32(llm: Any, **arguments: Any) -> None:
        begin(llm, **{**arguments, "dtype": "float32"})

    with patch.object(utils, "dispatch_cpu_unquantized_gemm", plain), patch.object(vllm.LLM, "__init__", in_float32):
        yield


def setattr_linear(layer: Any, remove_weight: bool = False) -> None:
    """Sets the product of a layer to torch's own, as `dispatch_cpu_unquantized_gemm` does where it packs nothing."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


SIDES = {"rlgen": run_rlgen, "stream": partial(run_rlgen, stream=True), "TRL": run_trl, "floor": run_floor}


def main() -> None:
    side, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    workload, steps = WORKLOADS[name], Steps()
    os.chdir(folder)
    logging.disable(logging.WARNING)
    SIDES[side](workload, folder, steps)


if __name__ == "__main__":
    main()
