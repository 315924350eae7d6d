"""Makes a warm-started tiny model: a short supervised phase on a recipe's task, stopped when it answers some prompts right.

    python scripts/warm_start.py recipes/demo-grpo.yaml --model tiny:qwen3 --out runs/warm/qwen3

RL needs a model that succeeds now and then; a random one never does. Under a minute on two cores.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from rlgen.data import build_prompts, load_rows
from rlgen.engines.transformers import TransformersEngine
from rlgen.models.load import load_model, load_tokenizer, locate, stop_ids
from rlgen.recipe import load_recipe
from rlgen.rollout.batch import pad_rows
from rlgen.rollout.sample import rollout
from rlgen.types import Sampling

BATCH = 64
EVERY = 5  # steps between two measurements
TRAIN_SEED, TEST_SEED = 1001, 2002  # other rows than those of the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="whose task, template and limits are used")
    parser.add_argument("--model", default="tiny:qwen3", help="what to start from")
    parser.add_argument("--out", type=Path, default=Path("runs/warm/qwen3"), help="folder to write")
    parser.add_argument("--accuracy", type=float, default=0.35, help="share of sampled answers that are right at the end")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-steps", type=int, default=1500)
    arguments = parser.parse_args()

    recipe = load_recipe(arguments.recipe, [f"model.path={arguments.model}"]).recipe
    location = locate(recipe.model.path)
    tokenizer = load_tokenizer(location, None)
    ends = stop_ids(tokenizer, location, None)
    streams = [build_prompts(recipe.data, load_rows(recipe.data, seed), tokenizer, seed) for seed in (TRAIN_SEED, TEST_SEED)]
    torch.manual_seed(0)
    model = load_model(location, None, torch.float32, "sdpa", torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    sampling = Sampling(max_tokens=recipe.rollout.max_completion_tokens, temperature=1.0, stop_ids=ends)
    tests = streams[1].take(0, 128)

    start, accuracy, step = time.monotonic(), 0.0, 0
    while accuracy < arguments.accuracy and step < arguments.max_steps:
        rows, labels = [], []
        for prompt in streams[0].take(step * BATCH, BATCH):
            answer = tokenizer(prompt.columns["answer"], add_special_tokens=False)["input_ids"]
            rows.append(torch.tensor([*prompt.prompt_ids, *answer, tokenizer.eos_token_id]))
            labels.append(torch.tensor([-100] * len(prompt.prompt_ids) + [*answer, tokenizer.eos_token_id]))
        logits = model(input_ids=pad_rows(rows, 0), use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), pad_rows(labels, -100)[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            engine = TransformersEngine(model=model, fp32_head=True, max_num_seqs=128)
            groups = rollout(engine, tests, sampling, 1, 0, engine.weight_version, tokenizer)
            model.requires_grad_(True)
            right = [g.samples[0].completion == g.prompt.columns["answer"] for g in groups]
            accuracy = sum(right) / len(right)
            print(
                f"step {step}  loss {loss.item():.3f}  right {accuracy:.2f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"{arguments.out} written: {accuracy:.2f} of sampled answers are right after {step} steps")
    if accuracy < arguments.accuracy:
        raise SystemExit(f"{arguments.accuracy} was not reached in {arguments.max_steps} steps")


if __name__ == "__main__":
    main()
