"""TRL 1.16.0's own advantages, importance weights and losses, by its own code, on given log-probs.

Its trainers are made without a model, an engine and data. What these would answer comes from a `Rollout`; all else that
runs is TRL's.
"""

import os
import warnings
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from helpers.batches import default_dtype
from replay import GROUP, MAX_TOKENS, PADDING, STOP, WEIGHTS, Outcome, Rollout
from torch import Tensor

# TRL sets VLLM_LOGGING_LEVEL when it is imported, which every server that a later test starts would inherit.
with patch.dict(os.environ), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the vLLM it was tried with, and other things that are not used here
    from trl import GRPOConfig, RLOOConfig
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.utils import split_tensor_dict


class OneProcess:
    """What TRL asks of accelerate."""

    device = torch.device("cpu")
    process_index = 0
    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, dim: int, pad_index: float) -> Tensor:
        return value

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Model:
    """Stands for a model where TRL passes one on; `Offline` answers in its place."""

    training = True
    is_gradient_checkpointing = False

    def train(self) -> None:
        """It is always."""


@cache
def defaults(config: type) -> dict[str, Any]:
    """Every setting of a TRL config by its name."""
    return vars(config(output_dir="unused", use_cpu=True, bf16=False, report_to="none"))


class Offline:
    """Before a TRL trainer in the order of its bases: the parts of it that would need a model, an engine or data."""

    config: type

    def __init__(self, rollout: Rollout, **settings: Any) -> None:
        known = defaults(self.config)
        assert settings.keys() <= known.keys(), settings.keys() - known.keys()
        settings = {**known, "max_completion_length": MAX_TOKENS, "num_generations": GROUP, **settings}
        self.__dict__.update(settings)  # TRL's trainers copy most settings under the same names
        self.args = SimpleNamespace(**settings)
        self.rollout = rollout
        self.policy_logp = rollout.policy_logp.clone().requires_grad_()
        self.entropy = rollout.entropy.clone().requires_grad_()
        self.accelerator = OneProcess()
        self.model, self.ref_model = Model(), Model()
        self._tokenizer = SimpleNamespace(pad_token_id=PADDING)
        self.eos_token_ids = [STOP]
        self.reward_func_names = self.reward_funcs = list(WEIGHTS)
        self.reward_weights = torch.tensor(list(WEIGHTS.values()))
        self._metrics = {"train": defaultdict(list)}
        self._logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = {}, {}
        self.aux_loss_enabled = False

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.rollout.reward_table

    def _get_per_token_logps_and_entropies(
        self, model: Model, input_ids: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        """TRL asks without gradients for the old log-probs and those of the reference, with gradients for the policy's."""
        rows = input_ids[:, 0]
        logp = self.policy_logp if torch.is_grad_enabled() else self.rollout.old_logp
        return (self.rollout.ref_logp if model is self.ref_model else logp)[rows], self.entropy[rows], None

    def scored(self) -> dict[str, Tensor]:
        """What TRL hands from sampling to training: masks, advantages, importance weights, log-probs."""
        with default_dtype(self.rollout.old_logp.dtype):
            return self._generate_and_score_completions([{"prompt": str(row)} for row in range(len(self.rollout.lengths))])

    def losses(self) -> list[Tensor]:
        """Of each micro-batch: one, unless `steps_per_generation` says more."""
        parts = split_tensor_dict(self.scored(), self.args.steps_per_generation)
        with default_dtype(self.rollout.old_logp.dtype):
            return [self._compute_loss(self.model, part) for part in parts]

    def outcome(self) -> Outcome:
        """The train batch's loss and gradients, by TRL's accumulation of micro-batches."""
        loss = torch.stack(self.losses()).sum()
        loss.backward()
        return Outcome.of(loss, self.policy_logp, self.entropy)


class GRPO(Offline, GRPOTrainer):
    config = GRPOConfig

    def __init__(self, rollout: Rollout, **settings: Any) -> None:
        super().__init__(rollout, **settings)
        self.epsilon_low = self.args.epsilon
        self.epsilon_high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._entropy_bonus_enabled = self.args.entropy_coef != 0
        self.environment_factories = self.environments = None
        self.tools = []

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        rollout, rows = self.rollout, range(len(prompts))
        tool_mask = [rollout.mask[row, : rollout.lengths[row]].long().tolist() for row in rows]
        sampler_logp = [rollout.sampler_logp[row, : rollout.lengths[row]].tolist() for row in rows]
        return [[row] for row in rows], rollout.completions, tool_mask, ["" for _ in rows], sampler_logp, {}, None, None


class RLOO(Offline, RLOOTrainer):
    config = RLOOConfig

    def __init__(self, rollout: Rollout, **settings: Any) -> None:
        super().__init__(rollout, **settings)
        self.epsilon_low = self.args.epsilon
        self.epsilon_high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return [[row] for row in range(len(prompts))], self.rollout.completions, ["" for _ in prompts]


class OnlineDPO(Offline, OnlineDPOTrainer):
    """Row i and row i + B / 2 are the completions of one prompt."""

    config = OnlineDPOConfig

    def __init__(self, rollout: Rollout, **settings: Any) -> None:
        super().__init__(rollout, **settings)
        self._beta = self.args.beta
        self.args.n_gpu = 1
        self.stats = defaultdict(list)
        self.processing_class = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["" for _ in ids])

    def _generate(self, model: Model, prompts: list[str], images: None) -> tuple[Any, ...]:
        rows = torch.arange(len(self.rollout.lengths))[:, None]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(c) for c in self.rollout.completions], batch_first=True)
        return rows, torch.ones_like(rows), ids, self.rollout.mask.long(), None

    def _forward(self, model: Model, prompt_ids: Tensor, *_: Any) -> Tensor:
        return self._get_per_token_logps_and_entropies(model, prompt_ids)[0]

    def _calculate_rewards_from_functions(self, **_: Any) -> Tensor:
        return (self.rollout.reward_table * self.reward_weights).sum(dim=1)

    def outcome(self) -> Outcome:
        with default_dtype(self.rollout.old_logp.dtype):
            loss = self.training_step(self.model, {"prompt": ["" for _ in range(len(self.rollout.lengths) // 2)]})
        return Outcome.of(loss, self.policy_logp, self.entropy)
