"""Samples with transformers alone: the fallback where vLLM does not run, and the reference to compare it with."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlgen.engines.base import (
    EngineCapabilities,
    EngineInfo,
    Finished,
    FollowUpQueue,
    Settings,
    SyncRecorder,
    SyncReport,
    Weights,
    wider_parameters,
)
from rlgen.engines.plan import settings_digest
from rlgen.errors import EngineError
from rlgen.losses.logp import head_dtype, log_softmax
from rlgen.models.decoder import decoder_of
from rlgen.models.memory_errors import memory_for, refused_with
from rlgen.models.policy import LmHead
from rlgen.models.vision import Vision, decoder_inputs
from rlgen.models.weights import model_tensors, own_tensors
from rlgen.types import Completion, FinishReason, Ids, Image, LogProbs, Request, Sampling, ids_of, one_span

BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8


class TransformersEngine:
    """An engine that decodes with its own copy of the model, in batches.

    Args:
        model: the engine's own copy, in its own dtype and on its own device; `sync` overwrites its weights.
        fp32_head: whether logits are computed in float32 whatever the dtype, as the trainer does.
        max_num_seqs: completions decoded at the same time.
        vision: embeds the images of prompts; None: the model reads none.

    Raises SetupError if the model's code cannot decode a batch with a cache.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        fp32_head: bool,
        max_num_seqs: int,
        vision: Vision | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._model, self._head, self._fp32_head = model.requires_grad_(False), LmHead.of(model), fp32_head
        self._max_num_seqs, self._vision, self._tokenizer = max_num_seqs, vision, tokenizer
        self.weight_version = 0
        self.abilities = EngineCapabilities(whole_step=True)
        self._try_decoding()

    def facts(self) -> EngineInfo:
        model = self._model
        # The composition of a batch affects the last bits of each row.
        decides = {"attention": model.config._attn_implementation, "max_num_seqs": self._max_num_seqs}
        ends = model.generation_config.eos_token_id if model.generation_config else None
        multiplied = head_dtype(torch.empty(0, dtype=model.dtype), self._fp32_head)
        return EngineInfo(
            engine=f"transformers {transformers.__version__}",
            plan=settings_digest(decides),
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
            wider=wider_parameters(model, model.dtype),
        )

    def _try_decoding(self) -> None:
        """Decodes two short prompts, of which one ends first. Raises SetupError if the code of the architecture cannot."""
        requests = [Request(prompt_ids=ids_of(ids), seed=seed) for seed, ids in enumerate([(3, 4, 5), (6,)])]
        with refused_with(
            f"engine.kind: transformers cannot decode {type(self._model).__name__} in batches with its cache ({{}}); if vLLM"
            " serves it, set engine.kind to colocated or server"
        ):
            first = self.generate(requests, Sampling(max_tokens=1, temperature=0.0, stop_ids=()))[0]
            self.generate(requests, Sampling(max_tokens=2, temperature=0.0, stop_ids=tuple(first.token_ids.tolist())))

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        arrived = dict(enumerate(requests))
        while True:
            # Prompts of similar length share a batch, to save left padding.
            order = sorted(arrived, key=lambda i: len(arrived[i].prompt_ids))
            for start in range(0, len(order), self._max_num_seqs):
                rows = order[start : start + self._max_num_seqs]
                less = [f"an engine.max_num_seqs below {len(rows)}", "a lower rollout.max_completion_tokens"]
                with memory_for(f"sampling {len(rows)} completions at a time", less, EngineError):
                    for row, answer in self._decode([arrived[i] for i in rows], sampling):
                        completions[rows[row]] = answer
                        if finished:
                            finished(rows[row], answer)
            more = further.wait(whole=True) if further is not None else []
            if not more:
                return [completions[i] for i in range(len(completions))]
            # The composition of a batch affects the last bits of each row, so it must not depend on the order of arrival.
            arrived = dict(sorted(enumerate(more, len(completions)), key=lambda item: item[1].seed))

    def _decode(self, requests: list[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Decodes one batch, and yields each row's number and completion as soon as it is finished."""
        device = self._model.device
        left, ids, attended = padded_on_the_left(requests, device)
        ends = [sampling.limit_of(request) for request in requests]
        longest, limits, some_end = max(ends), torch.tensor(ends, device=device), set(ends)
        uniforms = torch.stack([_uniforms(request.seed, sampling.max_tokens) for request in requests]).to(device)
        stops = torch.tensor(sampling.stop_ids, device=device)

        tokens = torch.zeros(len(requests), longest, dtype=torch.int32, device=device)
        logps = torch.zeros(len(requests), longest, device=device)

        def ended(row: int, length: int, reason: FinishReason) -> tuple[int, Completion]:
            return row, Completion(
                token_ids=tokens[row, :length].cpu().numpy().copy(),
                logp=logps[row, :length].cpu().numpy().copy(),
                finish_reason=reason,
                spans=one_span(length, self.weight_version),
                prompt_ids=requests[row].prompt_ids,
            )

        running = torch.arange(len(requests), device=device)  # rows still being decoded; finished ones are removed
        positions = (attended.cumsum(-1) - 1).clamp(min=0)
        cache = None  # the model makes its own: some have other kinds of layers than its config says
        inputs = decoder_inputs(self._vision, self._model, ids, [request.images for request in requests], left)
        for step in range(longest):
            output = decoder_of(self._model)(
                **inputs, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True
            )
            hidden, cache = output.last_hidden_state[:, -1], output.past_key_values
            logits = self._head.logits(hidden, self._fp32_head)
            logp = log_softmax(logits, sampling.distribution)
            # argmax of the logits, as in vLLM: rounding can make log-probs of different logits equal.
            chosen = logits.argmax(-1) if sampling.temperature == 0 else _inverse_cdf(logp, uniforms[running, step])
            chosen_logp = logp.gather(-1, chosen[:, None])[:, 0]
            stopped = torch.isin(chosen, stops)
            tokens[running, step], logps[running, step] = chosen.int(), chosen_logp
            if sampling.stop:
                ended_by_text = [self._completes(tokens[row, : step + 1], sampling.stop) for row in running.tolist()]
                stopped |= torch.tensor(ended_by_text, device=device)
            for row in running[stopped].tolist():
                yield ended(row, step + 1, "stop")
            if step + 1 in some_end:
                full = limits[running] == step + 1
                for row in running[full & ~stopped].tolist():
                    yield ended(row, step + 1, "length")
                stopped |= full
            keep = (~stopped).nonzero()[:, 0]
            if len(keep) == 0:
                return
            if len(keep) < len(running):
                cache.reorder_cache(keep)  # not `batch_select_indices`, which layers of linear attention lack
                running, attended, positions, chosen = running[keep], attended[keep], positions[keep], chosen[keep]
            inputs = {"input_ids": chosen[:, None]}
            attended = torch.cat([attended, attended.new_ones(len(running), 1)], dim=-1)
            positions = positions[:, -1:] + 1

    def _completes(self, ids: Tensor, stop: Sequence[str]) -> bool:
        """Returns whether the last of the ids completes one of the texts."""
        assert self._tokenizer is not None  # given whenever the recipe names such texts
        longest = max(len(text.encode()) for text in stop) + BYTES_OF_A_CHARACTER  # a token has a byte at least
        text = self._tokenizer.decode(ids[-longest:].tolist(), skip_special_tokens=True)
        return any(one in text for one in stop)

    @torch.no_grad()
    def prefill_logp(self, rows: Sequence[tuple[Ids, Ids]], images: Sequence[tuple[Image, ...]] = ()) -> list[LogProbs]:
        answers = []
        for (prompt_ids, completion_ids), own in zip(rows, images or [()] * len(rows), strict=True):
            ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids], dtype=np.int64))[None].to(self._model.device)
            inputs = decoder_inputs(self._vision, self._model, ids, [own])
            hidden = decoder_of(self._model)(**inputs, use_cache=False).last_hidden_state
            hidden = hidden[0, len(prompt_ids) - 1 : -1]
            logp = self._head.logits(hidden, self._fp32_head).log_softmax(-1)
            answers.append(logp.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].cpu().numpy())
        return answers

    @torch.no_grad()
    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        own, ledger = own_tensors(self._model), SyncRecorder(hashed)
        missing = set(own)
        for name, tensor in model_tensors(self._model, ledger.record(weights)):
            if name not in own or own[name].shape != tensor.shape:
                raise EngineError(f"weight sync: the engine has no tensor {name} of shape {tuple(tensor.shape)}")
            own[name].copy_(tensor)
            missing.discard(name)
        self.weight_version = version
        return SyncReport(version=version, received=ledger.received, not_loaded=tuple(sorted(missing)))

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        del self._model, self._head


def padded_on_the_left(requests: Sequence[Request], device: torch.device) -> tuple[list[int], Tensor, Tensor]:
    """Returns the padding before each prompt, the padded ids [N, S], and which of them are a prompt's, as 0 and 1 [N, S]."""
    width = max(len(request.prompt_ids) for request in requests)
    left = [width - len(request.prompt_ids) for request in requests]
    prompts = [torch.from_numpy(request.prompt_ids).long() for request in requests]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    attended = (torch.arange(width) >= torch.tensor(left)[:, None]).long()
    return left, ids.to(device), attended.to(device)


def _uniforms(seed: int, count: int) -> Tensor:
    """Returns [count] float64 numbers in [0, 1), one per token, that depend only on the seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inverse_cdf(logp: Tensor, uniform: Tensor) -> Tensor:
    """Samples ids [B] from log-probs [B, V], using one uniform number [B] each."""
    cdf = logp.double().exp().cumsum(-1)
    # Scaled by the sum, which rounding makes differ from 1, so that the draw stays inside the range.
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0].clamp(max=logp.shape[-1] - 1)
