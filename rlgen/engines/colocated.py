"""Runs vLLM in the trainer's process."""

import gc
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.base import (
    EngineCapabilities,
    EngineInfo,
    Finished,
    FollowUpQueue,
    SyncRecorder,
    SyncReport,
    Weights,
    require_experts,
)
from rlgen.engines.plan import EnginePlan
from rlgen.errors import EngineError, RlgenError, SetupError
from rlgen.heap import collecting_once
from rlgen.out_of_memory import failure_reason
from rlgen.types import Completion, Ids, Image, LogProbs, Request, Sampling, ids_of, logp_of, no_experts, one_span


class ColocatedEngine:
    """vLLM's offline engine in the trainer's process: a weight sync is a copy within the process.

    Args:
        plan: vLLM's settings. Processes that share one copy of the model must make the same calls.
        wait: timeout in seconds for waiting on another process, if several open their engines in torch's default process group.
            None: there is one process.

    Raises SetupError if vLLM is missing, or the plan is not possible here, EngineError if vLLM did not start.
    """

    def __init__(self, plan: EnginePlan, *, wait: float | None) -> None:
        if plan.sleep and not plan.on_gpu:
            raise SetupError("engine.sleep: the CPU engine cannot sleep; remove this key, which frees memory only on GPUs")
        arguments = vllm_compat.arguments(plan)
        if wait is not None:
            # vLLM's default executor uses the first GPU in every process, and starts its own processes for tensor parallelism.
            arguments["distributed_executor_backend"] = "external_launcher"
            arguments["distributed_timeout_seconds"] = arguments["cpu_distributed_timeout_seconds"] = math.ceil(wait)
        self._plan, self._asleep, self._answered = plan, False, False
        self.weight_version = self._syncs = 0
        self.abilities = EngineCapabilities(sleeps=plan.sleep)
        self._less_memory = vllm_compat.what_helps(arguments)
        with self._kept_as_is():
            self._vllm = vllm_compat.import_vllm()
            self._llm = vllm_compat.open_llm(self._vllm, arguments)

    def facts(self) -> EngineInfo:
        config, model = self._llm.llm_engine.vllm_config, vllm_weights.model_in(self._llm)
        (runner,) = self._llm.collective_rpc(vllm_compat.runner_of)
        return vllm_compat.facts(self._vllm, self._plan.digest(), config, model, runner)

    def _kept_as_is(self) -> AbstractContextManager[None]:
        """Returns the context in which vLLM runs."""
        return vllm_compat.process_kept_as_is(vllm_compat.exact_products(self._plan))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        further: FollowUpQueue | None = None,
    ) -> list[Completion]:
        def given(requests: Sequence[Request]) -> tuple[list[dict[str, Any]], list[Any]]:
            prompts = vllm_compat.vllm_prompts(requests, salt=f"{self.weight_version}.{self._syncs}")
            prompts = vllm_compat.with_images(prompts, [request.images for request in requests], self._plan.image_token)
            return prompts, [vllm_compat.sampling_params(self._vllm, request, sampling) for request in requests]

        with self._kept_as_is():
            tell = (lambda place, output: finished(place, self._completion(output))) if finished else None
            join = (lambda wait: given(further.wait() if wait else further.take())) if further else None
            listening = vllm_compat.each_as_it_finishes(self._llm, tell, join) if tell else nullcontext()
            outputs = self._run(*given(requests), listening)
        return [self._completion(output) for output in outputs]

    def _run(self, prompts: list[dict[str, Any]], params: list[Any], listening: AbstractContextManager[None]) -> list[Any]:
        """Runs vLLM's `generate` in the context `listening`. Raises EngineError if the engine sleeps or vLLM fails."""
        if self._asleep:  # vLLM would queue the requests and wait without a timeout
            raise EngineError("the engine sleeps and has no weights: only a weight sync wakes it")
        try:
            with listening:
                outputs: list[Any] = self._llm.generate(prompts, params, use_tqdm=False)
        except RlgenError:
            raise
        except Exception as error:  # vLLM does not wrap the errors of its libraries
            said = (failure_reason if self._answered else vllm_compat.refusal)(error, "sampling", self._less_memory)
            raise EngineError(f"vLLM failed while working on {len(prompts)} requests: {said}") from error
        self._answered = True
        return outputs

    def _completion(self, output: Any) -> Completion:
        """Converts vLLM's output to a completion. Raises EngineError for an aborted one."""
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a completion with finish_reason {answer.finish_reason!r}, not stop or length")
        completion = Completion(
            token_ids=ids_of(answer.token_ids),
            logp=logp_of(answer.logprobs.logprobs),
            finish_reason=answer.finish_reason,
            spans=one_span(len(answer.token_ids), self.weight_version),
            prompt_ids=ids_of(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            experts=answer.routed_experts if self._plan.experts else no_experts(),
        )
        if self._plan.experts:
            require_experts(completion)
        return completion

    def prefill_logp(self, rows: Sequence[tuple[Ids, Ids]], images: Sequence[tuple[Image, ...]] = ()) -> list[LogProbs]:
        with self._kept_as_is():
            prompts = [{"prompt_token_ids": np.concatenate(row).tolist()} for row in rows]
            prompts = vllm_compat.with_images(prompts, images or [()] * len(rows), self._plan.image_token)
            # vLLM reports log-probs of a prompt only at temperature 1, and must decode one token to report them.
            params = self._vllm.SamplingParams(
                temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
            )
            outputs = self._run(prompts, [params] * len(rows), nullcontext())
            # The first id of a prompt has no log-prob, so the flat list is one shorter than the prompt.
            return [
                logp_of(output.prompt_logprobs.logprobs[len(prompt_ids) - 1 :])
                for output, (prompt_ids, _) in zip(outputs, rows, strict=True)
            ]

    def sync(self, weights: Weights, version: int, hashed: bool = False) -> SyncReport:
        ledger = SyncRecorder(hashed)
        with self._kept_as_is():
            try:
                if self._asleep:
                    # Restores buffers (rotary caches, scales) from main memory; parameters are allocated empty.
                    self._llm.wake_up(["weights"])
                not_loaded = vllm_weights.load_weights(self._llm, ledger.record(weights))
                if self._asleep:
                    # After the load, whose temporary memory is free again.
                    if self._llm.wake_up(["kv_cache"]) is False:
                        raise EngineError(f"vLLM took the weights of version {version}, but did not wake up")
                    self._asleep = False
            except EngineError:
                raise
            except Exception as error:  # vLLM does not wrap the errors of its libraries
                said = failure_reason(error, "its wake-up" if self._asleep else "a weight sync", self._less_memory)
                raise EngineError(f"vLLM did not take the weights of version {version}: {said}") from error
        self.weight_version = version
        self._syncs += 1
        return SyncReport(version=version, received=ledger.received, not_loaded=not_loaded)

    def sleep(self) -> None:
        if self._plan.sleep and not self._asleep:
            with self._kept_as_is():
                self._asleep = True  # set first: if `sleep` fails half-way, only a sync makes the engine usable again
                self._llm.sleep(level=2)  # discards the weights, because the next sync sends all of them

    def close(self) -> None:
        # On a GPU vLLM gives memory back between its collections.
        with self._kept_as_is(), nullcontext() if self._plan.on_gpu else collecting_once():
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
