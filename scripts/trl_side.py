"""TRL's trainer of a cell of `make learn` and `make real-learn`. Nothing is imported for other trainers: starts are timed."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

Row = dict[str, Any]


def trainer_of(
    kind: str, settings: Mapping[str, Any], model: Path, rows: Sequence[Row], reward: Callable[..., float], out: Path
) -> Any:
    """Returns the trainer of that kind (grpo, rloo, online_dpo) on a model in float32, with `settings` of its config."""
    # TRL changes the environment when it is imported, and warns of the version of vLLM.
    with patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if kind == "grpo":
            from trl import GRPOConfig as Config
            from trl import GRPOTrainer as Trainer
        elif kind == "rloo":
            from trl import RLOOConfig as Config
            from trl import RLOOTrainer as Trainer
        else:
            from trl.experimental.online_dpo import OnlineDPOConfig as Config
            from trl.experimental.online_dpo import OnlineDPOTrainer as Trainer
    quiet = {"report_to": "none", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[for_trl(reward)],
        args=Config(output_dir=str(out), **quiet, **settings),
        train_dataset=Dataset.from_list(chats),
    )


def logged_rewards(trainer: Any) -> list[float]:
    """Returns the mean reward of each step."""
    names = ("reward", "objective/scores")  # the second is Online DPO's
    return [record[name] for record in trainer.state.log_history for name in names if name in record]


def for_trl(reward: Callable[..., float]) -> Callable[..., list[float]]:
    """Returns a reward of one completion as TRL calls it: with the messages of all completions, and columns as lists."""
    names = [name for name in signature(reward).parameters if name != "completion"]

    def of_all(completions: Sequence[Sequence[dict[str, str]]], **columns: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        rows = [{name: columns[name][place] for name in names if name in columns} for place in range(len(texts))]
        return [reward(completion=text, **row) for text, row in zip(texts, rows, strict=True)]

    return of_all
