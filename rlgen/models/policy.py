"""Computes log-probs and entropies of a completion's tokens with a causal language model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from rlgen.errors import SetupError
from rlgen.losses.inputs import onto
from rlgen.losses.logp import EntropyUse, HeadScores, LogitRule, head_scores, softmax_errors
from rlgen.models.decoder import decoder_of, one_sequence_a_row
from rlgen.models.half import FP8, HALF, compute_in_half, computed_in, round_to
from rlgen.models.lora import without_adapter
from rlgen.models.memory import cache_elements
from rlgen.models.memory_errors import refused_with
from rlgen.models.packed_attention import PackedRows
from rlgen.models.packing import make_packed, packed_states
from rlgen.models.parallel import ContextParallel, TensorParallel, join_rows
from rlgen.models.routing import Routes
from rlgen.models.vision import Vision, decoder_inputs, round_pixels
from rlgen.types import Distribution, MicroBatch

# Names that architectures give to what their logits are multiplied with, or divided by; `check_head` verifies the result.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
TRIED = tuple(range(3, 11))  # ids that a new policy is tried on


@dataclass(frozen=True, slots=True)
class LmHead:
    """The layer that turns hidden states into logits: softcap(scale * (hidden @ weight.T + bias))."""

    model: PreTrainedModel
    rule: LogitRule

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LmHead":
        """Returns the head of a model as its config describes it, see `check_head`."""
        config = model.config.get_text_config()
        scale = prod(getattr(config, name, None) or 1.0 for name in MULTIPLIERS)
        scale /= prod(getattr(config, name, None) or 1.0 for name in DIVISORS)
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls(model, LogitRule(softcap, float(scale)))

    @property
    def weight(self) -> Tensor:
        """Returns the weight [V, H] itself, so that the gradient of a tied head goes to the embedding."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.model.get_output_embeddings().bias
        return bias

    def logits(self, hidden: Tensor, fp32: bool) -> Tensor:
        """Computes logits: [N, H] -> [N, V] float32. Only for few positions, because [N, V] is large."""
        return replace(self.rule, fp32=fp32).logits(hidden, self.weight, self.bias)

    def scores(
        self, hidden: Tensor, ids: Tensor, distributions: Sequence[Distribution], entropy: EntropyUse, fp32: bool
    ) -> HeadScores:
        """Computes log-probs of `ids` [N] and entropies from hidden states [N, H], without holding all of [N, V]."""
        rule = replace(self.rule, fp32=fp32)
        return head_scores(hidden, self.weight, ids, distributions, entropy=entropy, bias=self.bias, rule=rule)


@torch.no_grad()
def check_head(model: PreTrainedModel, head: LmHead, ids: Sequence[int] = TRIED) -> None:
    """Compares the logits of `head` with the model's own on `ids`, and their hidden states with those of the first five.

    Raises:
        SetupError: the model cannot be run, or its log-probs would be wrong: logits differ, or hidden states see later ids.
    """
    name, row = type(model).__name__, torch.tensor([ids], device=model.device)
    with refused_with(f"model.path: {name} cannot be run on ids of text alone ({{}}); take a model that needs nothing else"):
        hidden, fewer = (decoder_of(model)(input_ids=some, use_cache=False).last_hidden_state for some in (row, row[:, :5]))
        own = model(input_ids=row, use_cache=False).logits.float()
    precise = hidden.dtype == torch.float32
    bound = 1e-4 if precise else 0.1
    gap = (head.logits(hidden[0], fp32=precise) - own[0]).abs().max().item()
    if not gap <= bound * max(1.0, own.abs().max().item()):
        raise SetupError(f"model.path: {name} computes its logits in a way rlgen does not know (they differ by {gap:.2g})")
    later = (hidden[:, :5].float() - fewer.float()).abs().max().item()
    if not later <= bound * max(1.0, fewer.abs().max().item()):
        raise SetupError(
            f"model.path: {name} does not generate from left to right: hidden states change by {later:.2g} with the ids after"
            " them; take a causal model (some need `is_decoder: true` in config.json)"
        )


class PolicyScores(NamedTuple):
    """Log-probs and entropies of a batch; both are 0 where the batch's mask is false."""

    logp: Tensor  # [K, B, T] float32, one slice per distribution
    entropy: Tensor  # [B, T] float32, nats, of the last distribution
    sure: Tensor | None  # [B, T] bool, of the last distribution: see `Truncation`. None: it is not truncated


class Hidden(NamedTuple):
    """The hidden states that predict the N sampled tokens of a batch, and the places of these tokens."""

    states: Tensor  # [N, H]
    rows: Tensor  # [N] row indices into [B, T]
    columns: Tensor  # [N] column indices into [B, T]


class Policy(nn.Module):
    """The model that is trained, or a frozen one to compare with.

    Args:
        model: a causal language model; its weights keep their own dtype (float32 for the one that is trained).
        dtype: of the forward pass's activations.
        fp32_head: whether logits are always computed in float32.
        vision: embeds the images of prompts; None: the model reads none.

    Raises:
        SetupError: rlgen does not know how the model computes its logits. For a model without values (on the meta device)
            `check` raises it.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, fp32_head: bool, vision: Vision | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = LmHead.of(model)
        self.dtype = dtype
        self.fp32_head = fp32_head
        self.vision = vision
        self.packed = False
        self.unpacked: str | None = None  # why its rows are padded, though they could be packed here
        self.tensor: TensorParallel | None = None  # the processes that split its layers
        self.context: ContextParallel | None = None  # the processes that share out the tokens of packed rows
        self.offload_activations = False  # of layers with gradient checkpointing, to the machine's memory
        self.routes: Routes | None = None  # of the trained policy, if it computes tokens by the experts that batches have
        if model.device.type != "meta":
            self.check(TRIED)
        if dtype == HALF:
            compute_in_half(model)
            if vision is not None:
                round_pixels(model)

    @property
    def sharing(self) -> int:
        """Returns how many neighbouring processes share out the tokens of a pass (`processes.context`); 1: each has its own."""
        return 1 if self.context is None or not self.packed else self.context.mesh.size()

    def check(self, ids: Sequence[int]) -> None:
        """Raises SetupError if the model computes its logits in a way that rlgen does not know.

        Args:
            ids: eight ids that the model is tried on. FSDP2 fails on a GPU when a method of a sharded module has no argument.
        """
        check_head(self.model, self.head, ids)

    def replay_routes(self) -> str | None:
        """Makes the policy compute tokens by the experts that batches have. Returns None, or why its model cannot do that."""
        found = Routes.of(self.model)
        self.routes = None if isinstance(found, str) else found
        return found if isinstance(found, str) else None

    def pack(self, prompts: Sequence[NDArray[np.int32]]) -> str | None:
        """Makes the policy compute the rows of a batch without padding. Returns None, or why its model cannot do that.

        Args:
            prompts: ids of texts of the run, on which the model is tried.
        """
        if self.routes is not None:
            self.routes.experts = None  # those of the last batch
        self.unpacked = make_packed(self.model, prompts, self.dtype)
        self.packed = self.unpacked is None
        return self.unpacked

    def unpack(self, reason: str) -> None:
        """Undoes `pack`, because of `reason`: its rows are padded again."""
        if self.packed:
            self.model.set_attn_implementation("sdpa")
        self.packed, self.unpacked = False, reason

    @property
    def attention_cost(self) -> float:
        """Returns what it costs a token to attend to another, in costs of all else that the model computes for a token.

        Counts two operations for each weight and token, and four for each pair of tokens and element of the heads.
        """
        elements = cache_elements(self.model.config, heads=("num_attention_heads",))  # of keys and of values
        return elements / sum(weight.numel() for weight in self.model.parameters())

    def padding(self, batch: MicroBatch) -> int:
        """Returns the number of positions that a forward pass of `batch` computes for padding."""
        return 0 if self.packed else batch.input_ids.numel() - sum(batch.lengths[: len(batch.rows)])

    def forward(self, batch: MicroBatch, distributions: Sequence[Distribution], entropy: EntropyUse = "none") -> PolicyScores:
        """Computes log-probs of the completion's tokens, and entropies of the distributions that they were sampled from.

        Args:
            batch: B rows, padded on the right, so that causal attention ignores the padding and no mask is needed.
            distributions: K of them; the logits are computed once.
            entropy: `none` (zeros are returned), `value` without gradient, or `gradient`.
        """
        device = batch.input_ids.device
        hidden_NH, rows, columns = self.hidden(batch)
        ids_N = batch.completion_ids[rows, columns]
        scores = self.head.scores(hidden_NH, ids_N, distributions, entropy, self.fp32_head)
        empty = torch.zeros(len(distributions), *batch.mask.shape, device=device)
        logp = empty.index_put((torch.arange(len(distributions), device=device)[:, None], rows, columns), scores.logp)
        sure = None if scores.sure is None else torch.zeros_like(batch.mask).index_put((rows, columns), scores.sure)
        entropies = empty[0] if scores.entropy is None else empty[0].index_put((rows, columns), scores.entropy)
        return PolicyScores(logp, entropies, sure)

    def scores_in(
        self, batch: MicroBatch, distributions: Sequence[Distribution], held: torch.dtype, dtype: torch.dtype
    ) -> Tensor:
        """Computes log-probs in `dtype` instead of the policy's own dtype, with padding, from weights rounded to `held`.

        Returns:
            [2, K, B, T] float64: the log-probs; and the errors of `softmax_errors`. Both are 0 where the batch's mask is false.
        """
        with self.computing_in(held, dtype):
            hidden_NH, rows, columns = self.hidden(batch)
            of_head, bias = HALF if held == FP8 else held, self.head.bias
            weight, bias = round_to(self.head.weight, of_head).to(dtype), None if bias is None else round_to(bias, of_head)
            ids_N = batch.completion_ids[rows, columns]
            found = softmax_errors(hidden_NH, weight, ids_N, distributions, bias, self.head.rule)
        scores = found.new_zeros(2, len(distributions), *batch.mask.shape)
        scores[:, :, rows, columns] = found
        return scores

    @contextmanager
    def computing_in(self, held: torch.dtype, dtype: torch.dtype) -> Iterator[None]:
        """Makes the decoder compute in `dtype` inside the block, with padding and without gradient; see `computed_in`."""
        own, packed, attention = self.dtype, self.packed, self.model.config._attn_implementation
        self.dtype, self.packed = dtype, False
        if packed:
            self.model.set_attn_implementation("sdpa")
        try:
            with computed_in(self.model, held, dtype):
                yield
        finally:
            self.dtype, self.packed = own, packed
            if packed:
                self.model.set_attn_implementation(attention)

    def logits(self, batch: MicroBatch) -> Tensor:
        """Computes the logits [N, V] float32 of the N sampled tokens, before any temperature. Only for few rows."""
        return self.head.logits(self.hidden(batch).states, self.fp32_head)

    def hidden(self, batch: MicroBatch) -> Hidden:
        """Computes the hidden states from which the head predicts the N sampled tokens."""
        pinned = batch.input_ids.device.type == "cuda"
        with one_sequence_a_row(), save_on_cpu(pinned) if self.offload_activations else nullcontext():
            decoder, own = decoder_of(self.model), batch.places
            group = self.tensor or (self.context if self.packed else None)
            if group is not None:
                batch = join_rows(batch, group.mesh)
            rows, columns = batch.places
            experts = None if batch.experts is None else batch.experts.flatten(0, 1)
            if self.packed:
                packed = PackedRows.of(batch.lengths, batch.prompt_lengths, batch.same_prompt, batch.input_ids.device)
                packed = replace(packed, context=self.context)
                experts = None if batch.experts is None else packed.mine(packed.packed(batch.experts), 0)
            if self.routes is not None:
                self.routes.experts = experts
            places: tuple[Tensor, ...]
            if self.packed:
                states, places = packed_states(decoder, batch.input_ids, packed), (packed.places(rows, columns),)
            else:
                inputs = decoder_inputs(self.vision, self.model, batch.input_ids, batch.images)
                states = decoder(**inputs, use_cache=False).last_hidden_state
                # The logits at a position predict the next id.
                places = rows, onto(torch.tensor(batch.prompt_lengths), batch.input_ids.device)[rows] - 1 + columns
            if self.tensor is not None:
                states = self.tensor.add_gradients(states)
        return Hidden(states[places].to(self.dtype), own[0], own[1])


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The frozen model under the adapter of a policy, without a copy: computes as the policy does with its adapter off."""

    policy: Policy

    def __call__(self, batch: MicroBatch, distributions: Sequence[Distribution], entropy: EntropyUse = "none") -> PolicyScores:
        """Computes what `Policy.forward` does. Goes through the policy itself, which gathers its weights if it is sharded."""
        with without_adapter(self.policy.model):
            scores: PolicyScores = self.policy(replace(batch, experts=None), distributions, entropy)
        return scores
