"""Sampling with transformers alone: the fallback where vLLM does not run, and the reference to compare it with."""

from collections.abc import Iterable, Sequence

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlgen.engines.base import Facts, Finished, Ledger, Receipt, Settings
from rlgen.errors import EngineError
from rlgen.losses.logp import head_dtype
from rlgen.models.policy import Head
from rlgen.models.shortage import memory_for
from rlgen.models.weights import model_tensors, own_tensors
from rlgen.types import Completion, FinishReason, Request, Sampling


class TransformersEngine:
    """Decodes a copy of the model in batches.

    Args:
        model: the engine's own copy, in its own dtype and on its own device; `sync` writes into it.
        fp32_head: compute logits in float32 whatever the dtype, as the trainer does.
        max_num_seqs: completions decoded at the same time.
    """

    def __init__(self, *, model: PreTrainedModel, fp32_head: bool, max_num_seqs: int) -> None:
        self._model = model.requires_grad_(False)
        self._head = Head.of(model)
        self._fp32_head = fp32_head
        self._max_num_seqs = max_num_seqs
        self._version = 0

    @property
    def weight_version(self) -> int:
        return self._version

    def facts(self) -> Facts:
        model = self._model
        ends = model.generation_config.eos_token_id if model.generation_config else None
        multiplied = head_dtype(torch.empty(0, dtype=model.dtype), self._fp32_head)
        return Facts(
            engine=f"transformers {transformers.__version__}",
            model=model.name_or_path,
            revision=None,
            settings=Settings(
                dtype=str(model.dtype).removeprefix("torch."),
                head_dtype=str(multiplied).removeprefix("torch."),
                logprobs_mode="processed_logprobs",
                vocab_size=self._head.weight.shape[0],
            ),
            stop_ids=(ends,) if isinstance(ends, int) else tuple(ends or ()),
            max_model_len=None,
            cache_block=None,
        )

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        # Prompts of like length share a batch: the padding is on the left here, and costs.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self._max_num_seqs):
            rows = order[start : start + self._max_num_seqs]

            def ended(row: int, answer: Completion, rows: list[int] = rows) -> None:
                completions[rows[row]] = answer
                if finished:
                    finished(rows[row], answer)

            less = [f"an engine.max_num_seqs below {len(rows)}", "a lower rollout.max_completion_tokens"]
            with memory_for(f"sampling {len(rows)} completions at a time", less, EngineError):
                self._decode([requests[i] for i in rows], sampling, ended)
        return [completions[i] for i in range(len(requests))]

    def _decode(self, requests: list[Request], sampling: Sampling, ended: Finished) -> None:
        """Hands over each row's completion when it has ended."""
        device = self._model.device
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        attended = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            attended[row, width - len(request.prompt_ids) :] = 1
        ids, attended = ids.to(device), attended.to(device)
        uniforms = torch.stack([_uniforms(request.seed, sampling.max_tokens) for request in requests]).to(device)
        stops = torch.tensor(sampling.stop_ids, device=device)

        tokens: list[list[int]] = [[] for _ in requests]
        logps: list[list[float]] = [[] for _ in requests]

        def end(row: int, reason: FinishReason) -> None:
            ended(
                row,
                Completion(
                    token_ids=tuple(tokens[row]),
                    logp=tuple(logps[row]),
                    finish_reason=reason,
                    weight_version=self._version,
                    prompt_ids=requests[row].prompt_ids,
                ),
            )

        running = torch.arange(len(requests), device=device)  # rows that still decode; finished ones leave the batch
        positions = (attended.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        for step in range(sampling.max_tokens):
            hidden = self._model.get_decoder()(
                input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            logits = self._head.logits(hidden, self._fp32_head)
            logp = (logits / sampling.logp_temperature).log_softmax(-1)
            # Of the logits, as vLLM does: rounding makes equal log-probs of unequal logits.
            chosen = logits.argmax(-1) if sampling.temperature == 0 else _inverse_cdf(logp, uniforms[running, step])
            chosen_logp = logp.gather(-1, chosen[:, None])[:, 0]
            stopped = torch.isin(chosen, stops)
            for row, token, value, ends in zip(
                running.tolist(), chosen.tolist(), chosen_logp.tolist(), stopped.tolist(), strict=True
            ):
                tokens[row].append(token)
                logps[row].append(value)
                if ends:
                    end(row, "stop")
            keep = (~stopped).nonzero()[:, 0]
            if len(keep) == 0:
                return
            if len(keep) < len(running):
                cache.batch_select_indices(keep)
                running, attended, positions, chosen = running[keep], attended[keep], positions[keep], chosen[keep]
            ids = chosen[:, None]
            attended = torch.cat([attended, attended.new_ones(len(running), 1)], dim=-1)
            positions = positions[:, -1:] + 1
        for row in running.tolist():
            end(row, "length")

    @torch.no_grad()
    def prefill_logp(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        answers = []
        for prompt_ids, completion_ids in rows:
            ids = torch.tensor([prompt_ids + completion_ids], device=self._model.device)
            hidden = self._model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 : -1]
            logp = self._head.logits(hidden, self._fp32_head).log_softmax(-1)
            answers.append(tuple(logp.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()))
        return answers

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> Receipt:
        own, ledger = own_tensors(self._model), Ledger(hashed)
        missing = set(own)
        for name, tensor in model_tensors(self._model, ledger.record(weights)):
            if name not in own or own[name].shape != tensor.shape:
                raise EngineError(f"weight sync: the engine has no tensor {name} of shape {tuple(tensor.shape)}")
            own[name].copy_(tensor)
            missing.discard(name)
        self._version = version
        return Receipt(version=version, received=ledger.received, not_loaded=tuple(sorted(missing)))

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        del self._model, self._head


def _uniforms(seed: int, count: int) -> Tensor:
    """[count] numbers in [0, 1), one a token: a completion's randomness is a function of its seed alone."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inverse_cdf(logp: Tensor, uniform: Tensor) -> Tensor:
    """Samples ids [B] from log-probs [B, V] with one uniform number [B] each."""
    cdf = logp.double().exp().cumsum(-1)
    # The sum is 1 but for rounding: scaled, so that the draw stays inside.
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0].clamp(max=logp.shape[-1] - 1)
