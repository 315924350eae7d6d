"""vLLM in this process."""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rlgen.engines import vllm_compat
from rlgen.engines.base import Facts, Finished, Ledger, Receipt
from rlgen.errors import EngineError, RlgenError, SetupError
from rlgen.models.shortage import reason
from rlgen.types import Completion, Request, Sampling


class ColocatedEngine:
    """vLLM's offline engine beside the trainer: a weight sync is a copy within the process.

    Args:
        model: folder or hub id that vLLM opens.
        revision: of a hub id.
        dtype: of weights and activations, `float32` or `bfloat16`; never guessed.
        fp32_head: compute logits in float32 whatever the dtype, as the trainer does.
        max_model_len: longest prompt and completion together, in tokens.
        max_num_seqs: completions decoded at the same time.
        kv_cache_gib: memory of the KV cache. None: on the CPU what `max_num_seqs` full sequences need, at most 4 GiB; on a
            GPU what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the GPU's memory for weights and cache together. None: 0.45.
        tensor_parallel_size: processes, each with its GPU, that share one copy of the model. They make the same calls.
        wait: seconds that one process waits for another, where several open their engines at the same time, in torch's default
            process group. None: there is one process.
        sleep: free weights and cache while the trainer works. Needs a GPU.
        model_impl: vLLM's own model code, that of transformers, or `auto`.
        quantization: a method of vLLM for the weights, or None.
        structured_outputs: open the tokenizer that a `Sampling.regex` is compiled against.
        enforce_eager: no graph capture. None: eager on the CPU, graphs on a GPU.
        extra: further arguments of vLLM; the recipe refuses those that are set here.

    Raises:
        SetupError: vLLM is missing.
        EngineError: vLLM did not start.
    """

    def __init__(
        self,
        *,
        model: str,
        revision: str | None,
        dtype: str,
        fp32_head: bool,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_gib: float | None,
        gpu_memory_utilization: float | None,
        tensor_parallel_size: int,
        wait: float | None,
        sleep: bool,
        model_impl: str,
        quantization: str | None,
        structured_outputs: bool,
        enforce_eager: bool | None,
        extra: dict[str, Any],
    ) -> None:
        on_gpu = torch.cuda.is_available()
        if sleep and not on_gpu:
            raise SetupError("engine.sleep: the CPU engine cannot sleep; remove it, it frees memory on GPUs only")
        arguments = vllm_compat.arguments(
            on_gpu=on_gpu,
            model=model,
            revision=revision,
            dtype=dtype,
            fp32_head=fp32_head,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            model_impl=model_impl,
            quantization=quantization,
            structured_outputs=structured_outputs,
            enforce_eager=enforce_eager,
            extra=extra,
        )
        arguments["enable_sleep_mode"] = sleep
        if wait is not None:
            # The ordinary executor takes the first GPU in every process, and starts processes of its own to share a model.
            arguments["distributed_executor_backend"] = "external_launcher"
            arguments["distributed_timeout_seconds"] = arguments["cpu_distributed_timeout_seconds"] = math.ceil(wait)
        self._sleeps, self._asleep = sleep, False
        self._version = 0
        self._syncs = 0
        self._less_memory = vllm_compat.what_helps(arguments)
        with vllm_compat.process_kept_as_is():
            self._vllm = vllm_compat.import_vllm()
            self._llm = vllm_compat.open_llm(self._vllm, arguments)

    @property
    def weight_version(self) -> int:
        return self._version

    def facts(self) -> Facts:
        engine = self._llm.llm_engine
        return vllm_compat.facts(self._vllm, engine.model_config, engine.vllm_config.cache_config)

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        prompts = vllm_compat.prompts_of(requests, salt=f"{self._version}.{self._syncs}")
        with vllm_compat.process_kept_as_is():
            params = [vllm_compat.sampling_params(self._vllm, request, sampling) for request in requests]
            tell = (lambda place, output: finished(place, self._completion(output))) if finished else None
            outputs = self._run(prompts, params, tell)
        return [self._completion(output) for output in outputs]

    def _run(
        self, prompts: list[dict[str, Any]], params: list[Any], finished: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        if self._asleep:  # vLLM would queue the requests and wait for ever
            raise EngineError("the engine sleeps, its weights are gone: only a weight sync wakes it")
        try:
            with vllm_compat.each_as_it_finishes(self._llm, finished) if finished else nullcontext():
                outputs: list[Any] = self._llm.generate(prompts, params, use_tqdm=False)
        except RlgenError:
            raise
        except Exception as error:  # vLLM raises whatever its parts raise
            said = reason(error, "sampling", self._less_memory)
            raise EngineError(f"vLLM failed while working on {len(prompts)} requests: {said}") from error
        return outputs

    def _completion(self, output: Any) -> Completion:
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a completion with finish_reason {answer.finish_reason!r}, not stop or length")
        return Completion(
            token_ids=tuple(answer.token_ids),
            logp=tuple(answer.logprobs.logprobs),
            finish_reason=answer.finish_reason,
            weight_version=self._version,
            prompt_ids=tuple(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
        )

    def prefill_logp(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        with vllm_compat.process_kept_as_is():
            prompts = [{"prompt_token_ids": [*prompt_ids, *completion_ids]} for prompt_ids, completion_ids in rows]
            outputs = self._run(prompts, [vllm_compat.prefill_params(self._vllm)] * len(rows))
            return [
                vllm_compat.prompt_logp(output, first=len(prompt_ids))
                for output, (prompt_ids, _) in zip(outputs, rows, strict=True)
            ]

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> Receipt:
        ledger = Ledger(hashed)
        with vllm_compat.process_kept_as_is():
            try:
                if self._asleep:
                    # Buffers (rotary caches, scales) come back from main memory, parameters come back empty.
                    self._llm.wake_up(["weights"])
                not_loaded = vllm_compat.load_weights(self._llm, ledger.record(weights))
                if self._asleep:
                    # Last: what the loader needs for a moment is free again.
                    if self._llm.wake_up(["kv_cache"]) is False:
                        raise EngineError(f"vLLM took the weights of version {version}, but did not wake up")
                    self._asleep = False
            except EngineError:
                raise
            except Exception as error:  # vLLM raises whatever its parts raise
                said = reason(error, "its wake-up" if self._asleep else "a weight sync", self._less_memory)
                raise EngineError(f"vLLM did not take the weights of version {version}: {said}") from error
        self._version = version
        self._syncs += 1
        return Receipt(version=version, received=ledger.received, not_loaded=not_loaded)

    def sleep(self) -> None:
        if self._sleeps and not self._asleep:
            with vllm_compat.process_kept_as_is():
                self._asleep = True  # even if it fails half-way: only a sync makes the engine whole again
                self._llm.sleep(level=2)  # the next sync brings all weights, so none need be kept

    def close(self) -> None:
        with vllm_compat.process_kept_as_is():
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
