"""A worker for vLLM's CPU engine whose decode steps cost less Python, with the same results.

With a small model, most of a decode step is not arithmetic: vLLM prepares the inputs of the batch anew, goes through the model's
modules, draws a seed for each request's noise from a generator of its own, counts the rank of each token, and normalises with
seven operations although it has a kernel for that. This module skips all of this where the result is known to be the same.
Otherwise vLLM's own code runs. `tests/engines/test_decode.py` compares it with vLLM's worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from vllm import envs
from vllm._custom_ops import cpu_attn_get_scheduler_metadata
from vllm.config import CompilationMode
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.distributed.ec_transfer import has_ec_transfer
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from rlgen.engines.cpu_decode.recording import Recording, record
from rlgen.engines.vllm_compat import EXPERTS

RECORDED = 2  # the second step that continues another one is recorded; recording takes the time of two steps
SEEDS = 64  # drawn at a time from the generator of a request
NONE_DRAWN: Iterator[int] = iter(())
Seeds: TypeAlias = WeakKeyDictionary[torch.Generator, Iterator[int]]  # drawn, and not used yet


class DecodeWorker(CPUWorker):
    """vLLM's worker with the runner of this module."""

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:  # the class is named in vLLM's method, so it is changed afterwards
            self.model_runner.__class__ = DecodeRunner


@dataclass(slots=True)
class Step:
    """A step in which each of B requests decoded one token. Its tensors are views of the runner's own."""

    scheduled: list[str]  # the requests as the scheduler named them
    computed: np.ndarray[Any, np.dtype[np.int32]]  # [B] tokens that were computed before the step
    places: Tensor  # [B] of each request's last token in the table of all tokens
    context: ForwardContext
    arguments: dict[str, Any]  # of the model
    attention: list[tuple[CPUAttentionMetadata, CPUAttentionMetadataBuilder]]  # by group of layers
    followed: int = 0  # steps that continued it
    recording: Recording | None = None  # of one of these


class DecodeRunner(CPUModelRunner):
    """vLLM's runner, with a shorter path for a step in which the same requests as before decode their next tokens."""

    sampler: Any
    _last: Step | None = None  # the last step, if the next one can continue it
    _forward: tuple[ForwardContext, dict[str, Any]] | None = None  # context and arguments of the model's last call
    _recordable: bool = True  # whether the model calls only kernels that can be repeated
    _compared: bool = False  # whether a repeated step gave what the model itself gives
    _experts: AuxOutputWorkerConnector | None = None  # vLLM's own, which only its runner V2 feeds; None: nobody wants them

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            choose_kernels(self.model)
        if type(self.sampler) is Sampler:
            self.sampler = DecodeSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *positional: Any, **named: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *positional, **named)
        if self.vllm_config.additional_config.get(EXPERTS):
            self._experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples the tokens of a step. Adds the experts that its forward pass has left, if they are wanted."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if self._experts is None or state is None:
            return output
        scheduled = state.scheduler_output.num_scheduled_tokens
        starts = np.cumsum([0, *(scheduled[name] for name in output.req_ids)])
        computed = self.input_batch.num_computed_tokens_cpu[: len(output.req_ids)].copy()
        batch = SimpleNamespace(req_ids=output.req_ids, query_start_loc_np=starts, num_computed_tokens_np=computed)
        if (pending := self._experts.prepare_output(batch)) is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def reload_weights(self, *positional: Any, **named: Any) -> None:
        """Loads other weights, even while requests run. Drops the recording, whose kernels hold the previous weights."""
        self._last = None
        super().reload_weights(*positional, **named)

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """Computes the logits of a step, for `sample_tokens`."""
        if self._experts is not None:
            self._experts.begin_step(scheduler_output.aux_output_connector_metadata)
        last, self._last = self._last, None
        if last is not None and self._goes_on(last, scheduler_output):
            self._go_on(last, scheduler_output)
            self._last = last
            return None
        self._forward = None
        result = super().execute_model(scheduler_output, intermediate_tensors)
        self._last = self._step(scheduler_output)
        return result

    def _model_forward(self, *positional: Any, **named: Any) -> Any:
        if not positional:
            self._forward = get_forward_context(), named
        return super()._model_forward(*positional, **named)

    @cached_property
    def _plain(self) -> bool:
        """Returns whether ids and positions are the model's only inputs, in memory that host and device share."""
        tables = self.input_batch.block_table.block_tables
        buffers = (self.input_ids, self.query_start_loc, *(table.block_table for table in tables))
        return (
            all(buffer.gpu is buffer.cpu for buffer in buffers)
            and all(table.dcp_world_size == 1 and table.slot_mapping_mode.name == "TOKEN_TO_KV_SLOT" for table in tables)
            and not (self.uses_mrope or self.enable_prompt_embeds or self.lora_config or self.speculative_config)
            and not (self.use_async_scheduling or self.num_accepted_tokens_event or self.is_pooling_model)
            and not (self.supports_mm_inputs or self.use_aux_hidden_state_outputs or self.broadcast_pp_output)
            and not (self.eplb_state or has_kv_transfer_group() or has_ec_transfer())
            and get_pp_group().world_size == 1
        )

    def _step(self, output: SchedulerOutput) -> Step | None:
        """Returns what the next step needs of the one that vLLM's own code has just computed; None: it cannot continue that."""
        batch, count = self.input_batch, self.input_batch.num_reqs
        scheduled = output.scheduled_cached_reqs.req_ids
        if self._forward is None or not self._plain or not output.total_num_scheduled_tokens == len(scheduled) == count:
            return None
        computed = batch.num_computed_tokens_cpu[:count]
        # A request may have more known tokens than the step ends with: what is sampled for it is then dropped.
        if self.num_prompt_logprobs or not np.array_equal(batch.num_tokens_no_spec[:count], computed + 1):
            return None
        context, arguments = self._forward
        groups = [group for groups in self.attn_groups for group in groups]
        attention = [(context.attn_metadata[group.layer_names[0]], group.get_metadata_builder(0)) for group in groups]
        for metadata, builder in attention:
            if type(metadata) is not CPUAttentionMetadata or type(builder) is not CPUAttentionMetadataBuilder:
                return None
            if builder.is_cross_attention or builder.is_encoder_only_attention or metadata.dynamic_causal is not None:
                return None
        places = torch.from_numpy(np.arange(count) * batch.token_ids_cpu.shape[1] + computed)
        return Step(list(scheduled), computed.copy(), places, context, arguments, attention)

    def _goes_on(self, last: Step, output: SchedulerOutput) -> bool:
        """Returns whether a step decodes the next token of the same requests, in the blocks that they have."""
        requests = output.scheduled_cached_reqs
        return (
            requests.req_ids == last.scheduled
            and output.total_num_scheduled_tokens == len(last.scheduled)
            and not (output.scheduled_new_reqs or output.finished_req_ids or output.preempted_req_ids)
            and not (output.new_block_ids_to_zero or output.kv_cache_block_copies or output.free_encoder_mm_hashes)
            and not (output.scheduled_spec_decode_tokens or output.scheduled_encoder_inputs or requests.resumed_req_ids)
            and not any(requests.new_block_ids)
            and np.array_equal(self.input_batch.num_tokens_no_spec[: len(last.scheduled)], last.computed + 2)
        )

    def _go_on(self, last: Step, output: SchedulerOutput) -> None:
        """Moves the inputs by one token, and computes the logits."""
        batch, count = self.input_batch, len(last.scheduled)
        batch.refresh_metadata()  # some settings of sampling depend on how many tokens there are
        np.add(last.computed, 1, out=last.computed)
        batch.num_computed_tokens_cpu[:count] += 1
        for numbers in (self.num_computed_tokens, self.positions, self.seq_lens, self.optimistic_seq_lens_cpu):
            numbers[:count].add_(1)
        torch.index_select(batch.token_ids_cpu_tensor.flatten(), 0, last.places.add_(1), out=self.input_ids.cpu[:count])
        starts, positions = self.query_start_loc.gpu[: count + 1], self.positions[:count]
        for table in batch.block_table.block_tables:
            torch.ops._C.compute_slot_mapping_kernel_impl(
                starts, positions, table.block_table.gpu, table.slot_mapping.gpu, table.block_size
            )
        for metadata, builder in last.attention:
            move_on(metadata, builder)
        hidden, logits = self._compute(last)
        self.execute_model_state = ExecuteModelState(
            scheduler_output=output,
            logits=logits,
            spec_decode_metadata=None,
            spec_decode_common_attn_metadata=None,
            hidden_states=hidden,
            sample_hidden_states=hidden,
            aux_hidden_states=None,
            ec_connector_output=None,
            cudagraph_stats=None,
            slot_mappings=None,
        )

    def _compute(self, last: Step) -> tuple[Tensor, ...]:
        """Returns hidden states and logits of a step that continues `last`: from recorded kernels, once there are some."""
        last.followed += 1
        changing = [metadata.scheduler_metadata for metadata, _ in last.attention]
        if last.recording is not None:
            if self._compared:
                return last.recording.repeat(changing)
            expected = self._run_model(last)
            repeated = last.recording.repeat(changing)
            self._compared = all(map(torch.equal, expected, repeated))
            self._recordable, last.recording = self._compared, last.recording if self._compared else None
            return expected
        if last.followed < RECORDED or not self._recordable:
            return self._run_model(last)
        computed, last.recording = record(partial(self._run_model, last), changing)
        self._recordable = last.recording is not None
        return computed

    def _run_model(self, last: Step) -> tuple[Tensor, ...]:
        """Does as `_compute`, by the model itself."""
        last.context.moe_layer_index = 0
        with override_forward_context(last.context):
            hidden = super()._model_forward(**last.arguments)
        return hidden, self.model.compute_logits(hidden)


def move_on(metadata: CPUAttentionMetadata, builder: CPUAttentionMetadataBuilder) -> None:
    """Changes the metadata of a step's attention to what `CPUAttentionMetadataBuilder.build` returns for the next step.

    Its tensors have changed with the runner's.
    """
    metadata.max_seq_len += 1
    metadata.scheduler_metadata = cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=None,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


class DecodeSampler(Sampler):
    """vLLM's sampler, which draws the same tokens."""

    def __init__(self, logprobs_mode: Any, use_fp64_gumbel: bool) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        own = self.topk_topp_sampler
        if own.forward == own.forward_cpu and not use_fp64_gumbel:
            own.forward = partial(draw, own, Seeds())

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Returns the log-probs of the sampled tokens, without their ranks, which nobody reads, if no others are asked for."""
        if num_logprobs:
            found: LogprobsTensors = Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
            return found
        ids = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids))


def draw(
    sampler: TopKTopPSampler,
    seeds: Seeds,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Samples as `TopKTopPSampler.forward_cpu` does. Draws many seeds of a request at a time, which are the same seeds.

    Changes `logits` [B, V]. Returns ids [B], and the log-probs [B, V] of those that can be sampled, if they are asked for.
    """
    if len(generators) != len(logits):
        drawn: tuple[Tensor, Tensor | None] = sampler.forward_cpu(logits, generators, k, p)
        return drawn
    logits = apply_top_k_top_p(logits, k, p)
    told = None
    if sampler.logprobs_mode == "processed_logits":
        told = logits
    elif sampler.logprobs_mode == "processed_logprobs":
        told = logits.log_softmax(dim=-1, dtype=torch.float32)
    of_rows = torch.tensor([next_seed(seeds, generators[row]) for row in range(len(logits))])
    return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), of_rows), told


def next_seed(seeds: Seeds, generator: torch.Generator) -> int:
    """Returns the seed that vLLM would draw next from a generator."""
    seed = next(seeds.get(generator, NONE_DRAWN), None)
    if seed is None:
        drawn = iter(torch.randint(0, 2**31, (SEEDS,), generator=generator, dtype=torch.long).tolist())
        seed, seeds[generator] = next(drawn), drawn
    return seed


def choose_kernels(model: nn.Module) -> None:
    """Makes an uncompiled float32 model normalise with vLLM's kernel, and call its attention without the dispatcher."""
    for layer in model.modules():
        if type(layer) is RMSNorm and layer.has_weight and layer.variance_size_override is None:
            if layer.weight.dtype == torch.float32:
                layer._forward_method = partial(norm, layer)
        elif hasattr(layer, "use_direct_call"):
            layer.use_direct_call = True  # type: ignore[assignment]


def norm(layer: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Any:
    """Returns what `RMSNorm.forward` does: x, or x + residual, normalised; with a residual also the sum. May change both."""
    if residual is None:
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), layer.weight, layer.variance_epsilon)  # the kernel assumes rows without gaps
        return out
    x, residual = x.contiguous(), residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, layer.weight, layer.variance_epsilon)
    return x, residual
