"""A scheduler for vLLM that spends next to nothing on a step in which every running request decodes one token.

vLLM's scheduler looks at each request in each step: does it need blocks, how many tokens, is it over? With a small model on a CPU
that takes longer than the model's forward pass. While no request joins or leaves, the answers are known beforehand: each gets one
token, and a block only where one is full. This module computes such steady steps, with the same result. vLLM's own code handles
every other step, and every request that ends. In `tests/engines/test_decode.py` ids, log-probs and blocks are the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rlgen.engines.vllm_compat import EXPERTS, HELD


class SteadyRequest(NamedTuple):
    """A running request in steady steps."""

    request: Request
    held: bool  # its caller wants the whole completion at once (`vllm_compat.HELD`) and gets no token before
    stops: frozenset[int]  # ids that end it
    limit: int  # tokens, prompt included, at which it ends


class Held(NamedTuple):
    """Tokens of a request that are held back from its caller."""

    ids: list[int]
    logprobs: list[LogprobsLists]  # of consecutive ranges of these tokens, except the last ones in the stretch


class Stretch(NamedTuple):
    """Consecutive steady steps whose outputs have the same requests in the same rows."""

    places: dict[str, int]  # request -> its row in the output
    logprobs: list[LogprobsLists]  # [S] of [B, 1 or more]


class DecodeScheduler(Scheduler):
    """vLLM's scheduler, with a shorter path for steady steps."""

    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]
    _rows: tuple[SteadyRequest, ...] = ()  # the running requests, if all of them were decoding in the last step
    _step: SchedulerOutput | None = None  # the steady step whose tokens have not arrived yet
    _stretch: Stretch | None = None  # the last steady steps in which no request left

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        if self.vllm_config.additional_config.get(EXPERTS):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._held: dict[str, Held] = {}

    @cached_property
    def _plain(self) -> bool:
        """Returns whether only the blocks of one full-attention cache are scheduled: no adapter, connector, draft or encoder."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return (
            len(managers) == 1
            and type(managers[0]) is FullAttentionManager
            and managers[0].block_size == self.block_size
            and not (self.connector or self.ec_connector or self.aux_output_connector or self.perf_metrics)
            and not (self.lora_config or self.num_spec_tokens or self.num_lookahead_tokens or self.prefix_replay_tokens)
            and not (self.use_pp or self.use_v2_model_runner or self.is_encoder_decoder or self.is_mm_encoder_only)
            and not (self.defer_block_free or self.has_mamba_layers or self.return_sampling_mask)
            and self.num_sampled_tokens_per_step == 1
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Returns what the model is to compute in the next step."""
        if not throttle_prefills and self._is_steady():
            self._step = self._next_token_of_each()
            return self._step
        self._rows = ()
        return super().schedule(throttle_prefills)

    def _is_steady(self) -> bool:
        """Returns whether every running request decodes one token in this step, and no other request can join."""
        full = len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs
        if (
            not (self._plain and self.running)
            or self._pause_state != PauseState.UNPAUSED
            or self.kv_holding_waiting
            or (self.waiting and not full)
            or len(self.running) > min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        ):
            return False
        if len(self._rows) != len(self.running):  # requests leave `running` at any time, but join it only in super().schedule()
            scheduled = self.prev_step_scheduled_req_ids
            if not all(is_decoding(request) and request.request_id in scheduled for request in self.running):
                return False
            self._rows = tuple(steady_request(request, self.max_model_len, self.log_stats) for request in self.running)
            for name in self._held.keys() - self.requests.keys():  # aborted
                del self._held[name]
        wanted = sum(request.num_computed_tokens % self.block_size == 0 for request in self.running)
        return wanted <= self.kv_cache_manager.block_pool.get_num_free_blocks()  # else vLLM decides which one is preempted

    def _next_token_of_each(self) -> SchedulerOutput:
        """Returns a step with one token of each running request."""
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: list[tuple[list[int], ...] | None] = [None] * len(self._rows)
        for place, row in enumerate(self._rows):
            # A block is allocated for its first token, and enters the prefix cache with its last one.
            if row.request.num_computed_tokens % self.block_size in (0, self.block_size - 1):
                taken = self.kv_cache_manager.allocate_slots(row.request, 1)
                if taken is None:
                    raise RuntimeError(f"vLLM has no block for {row.request.request_id}, though one is free")
                blocks[place] = taken.get_block_ids(allow_none=True)
        names = [row.request.request_id for row in self._rows]
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=[row.request.num_computed_tokens for row in self._rows],
                num_output_tokens=[len(row.request._output_token_ids) for row in self._rows],
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self.num_spec_tokens,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        for row in self._rows:
            row.request.num_computed_tokens += 1
            row.request.num_in_flight_tokens += 1
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, Any]:
        """Records the sampled tokens, and returns the outputs for the callers: those of a held request only when it ends."""
        steady, self._step = scheduler_output is self._step, None
        if steady and not (model_runner_output.prompt_logprobs_dict or model_runner_output.num_nans_in_logits):
            left = self._hold(model_runner_output)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=left)
        told: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self._held:
            self._tell(told)
        return told

    def _hold(self, output: ModelRunnerOutput) -> dict[str, int]:
        """Holds back the tokens of held requests that continue. Returns the other requests, which vLLM's own code handles."""
        places, sampled = output.req_id_to_index, output.sampled_token_ids
        if output.logprobs is not None:
            if self._stretch is None or self._stretch.places != places:
                self._deal()
                self._stretch = Stretch(dict(places), [])
            self._stretch.logprobs.append(output.logprobs)
        left: dict[str, int] = {}
        for request, held, stops, limit in self._rows:
            name = request.request_id
            token = sampled[places[name]][0]
            if not held or token in stops or len(request._all_token_ids) + 1 >= limit or request.is_finished():
                left[name] = 1
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % self.hash_block_size == 0:
                request.update_block_hashes()
            if name not in self._held:
                self._held[name] = Held([], [])
            self._held[name].ids.append(token)
        return left

    def _deal(self) -> None:
        """Ends the stretch, and gives each held request its log-probs from it."""
        if self._stretch is None:
            return
        places, steps = self._stretch
        ids = np.stack([step.logprob_token_ids[:, :1] for step in steps])  # [S, B, 1]
        logprobs = np.stack([step.logprobs[:, :1] for step in steps])
        ranks = np.stack([step.sampled_token_ranks for step in steps])  # [S, B]
        for name, held in self._held.items():
            new = len(held.ids) - sum(len(part.logprobs) for part in held.logprobs)
            if new:
                place = places[name]
                held.logprobs.append(LogprobsLists(ids[:new, place], logprobs[:new, place], ranks[:new, place]))
        self._stretch = None

    def _tell(self, told: Mapping[int, Any]) -> None:
        """Puts the held tokens of each request in `told` before its new ones."""
        for output in (output for outputs in told.values() for output in outputs.outputs):
            if output.request_id not in self._held:
                continue
            self._deal()
            held = self._held.pop(output.request_id)
            output.new_token_ids = [*held.ids, *output.new_token_ids]
            if output.new_logprobs is not None:
                parts = [*held.logprobs, output.new_logprobs]
                output.new_logprobs = LogprobsLists(
                    np.concatenate([part.logprob_token_ids[:, :1] for part in parts]),
                    np.concatenate([part.logprobs[:, :1] for part in parts]),
                    np.concatenate([part.sampled_token_ranks for part in parts]),
                )


def is_decoding(request: Request) -> bool:
    """Returns whether a running request decodes one token a step, and needs nothing else of vLLM in each step."""
    return (
        request.status == RequestStatus.RUNNING
        and bool(request._output_token_ids)
        and request.num_tokens_with_spec - request.num_computed_tokens == 1
        and not (request.spec_token_ids or request.mm_features or request.use_structured_output or request.pooling_params)
        and not (request.resumable or request.num_output_placeholders or request.num_stale_output_tokens)
        and not (request.is_prefill_chunk or request.lora_request)
    )


def steady_request(request: Request, max_model_len: int, log_stats: bool) -> SteadyRequest:
    """Returns a running request with the ids and the length that end it. With `log_stats`, vLLM counts each step's tokens."""
    params = request.sampling_params
    held: bool = (
        params.output_kind == RequestOutputKind.FINAL_ONLY
        and (params.extra_args or {}).get(HELD, False)
        and not (log_stats or params.detokenize or params.stop or params.min_tokens or params.repetition_detection)
        and not params.num_logprobs
    )
    stops = frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
    return SteadyRequest(request, held, stops, min(max_model_len, request.num_prompt_tokens + request.max_tokens))
