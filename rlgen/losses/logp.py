"""Log-probs and entropies from hidden states, in chunks, so that the [positions, vocabulary] logits never exist as a whole."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlgen.types import Distribution

EntropyUse: TypeAlias = Literal["none", "value", "gradient"]

# Logits computed at once, in elements: 256 MiB in float32, 441 positions of a vocabulary of 152k.
CHUNK_LOGITS = 2**26
NUCLEUS = 256  # ids that are sorted at first to find a nucleus: most are smaller, and a vocabulary takes long to sort
# How far rounding may move a log-prob or a sum of probabilities, by the dtype of the hidden states: torch's own float32 softmax
# over 262,144 ids moves them by 7e-5.
NEAR = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
DROPPED = -1e30  # log-prob of an id that is not kept: finite, so that 0 times it is 0


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How a head makes logits of hidden states: softcap(scale * (hidden @ weight.T + bias)).

    softcap(z) = softcap * tanh(z / softcap).
    """

    softcap: float | None = None
    scale: float = 1.0
    fp32: bool = True  # add up in float32 and do not round the sums (float64 stays); else round them to the dtype of `hidden`

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns logits.

        Args:
            hidden: [N, H].
            weight: [V, H], bias: [V]; rounded to the dtype of `hidden`, in which the engine holds them.

        Returns:
            [N, V] float32 (float64 for float64 input). An autocast around the call has no effect.
        """
        wide = head_dtype(hidden, fp32=True)
        hidden, weight, bias = self.factors(hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            if self.fp32 and hidden.dtype != wide:
                logits_NV = torch.mm(hidden, weight.T, out_dtype=wide)
                if bias is not None:
                    logits_NV += bias
            else:
                logits_NV = torch.nn.functional.linear(hidden, weight, bias).to(wide)
        if self.scale != 1.0:
            logits_NV = self.scale * logits_NV
        return logits_NV if self.softcap is None else self.softcap * torch.tanh(logits_NV / self.softcap)

    def factors(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns all three as the products take them, so that the weight is not rounded again for each chunk."""
        dtype = hidden.dtype
        rounded = None if bias is None else factor(bias, dtype, self.fp32)
        return factor(hidden, dtype, self.fp32), factor(weight, dtype, self.fp32), rounded


PLAIN = LogitRule()


class Truncation(NamedTuple):
    """Which ids a distribution keeps at each of C positions."""

    lowest: Tensor  # [C] the lowest logit that is kept; -inf: all are. Equal logits are kept together
    beside: Tensor  # [C] the lowest that is kept beside a lower sampled one, which takes the place of the `top_k`-th
    sure: Tensor  # [C] bool: no id is so near the edge that rounding decides whether it is kept

    def dropped(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Returns [C, V] bool, the ids that are not kept. `ids` are: the engine has sampled them, whatever rounding says here."""
        ids_C1, lowest_C1 = ids[:, None], self.lowest[:, None]
        lowest_C1 = lowest_C1.where(logits.gather(1, ids_C1) >= lowest_C1, self.beside[:, None])
        return (logits < lowest_C1).scatter_(1, ids_C1, False)


def truncation(logits: Tensor, distribution: Distribution, near: float = 0.0) -> Truncation:
    """Returns which ids are kept. The rules and their order are those of `Distribution`; each keeps the most probable id.

    Args:
        logits: [C, V], not divided by the temperature.
        near: how far rounding may move a log-prob, or a sum of probabilities.
    """
    temperature, top_p, vocabulary = distribution.temperature, distribution.top_p, logits.shape[1]
    lowest_C, sure_C = logits.new_full(logits.shape[:1], -torch.inf), logits.new_ones(logits.shape[:1], dtype=torch.bool)
    if distribution.min_p > 0:
        lowest_C = logits.amax(dim=1) + temperature * math.log(distribution.min_p)
        sure_C = ((logits - lowest_C[:, None]).abs() >= near * temperature).all(dim=1)
    last_two_C2 = None
    if 0 < distribution.top_k < vocabulary:  # the k-th and the next id can only change places if they are equally probable
        last_two_C2 = torch.nn.functional.pad(logits.topk(distribution.top_k).values, (1, 0), value=torch.inf)[:, -2:]
        lowest_C = lowest_C.maximum(last_two_C2[:, 1])
    if top_p < 1:
        rest_CV = (logits / temperature).masked_fill_(logits < lowest_C[:, None], -torch.inf)
        total_C1, count = rest_CV.logsumexp(dim=1, keepdim=True), min(NUCLEUS, vocabulary)
        while True:
            highest_CM, ids_CM = logits.topk(count)
            share_CM = (rest_CV.gather(1, ids_CM) - total_C1).exp()
            through_CM = share_CM.cumsum(dim=1)
            if count == vocabulary or (through_CM[:, -1] >= top_p).all():
                break
            count = min(4 * count, vocabulary)
        before_CM = through_CM - share_CM
        last_C1 = (before_CM < top_p).sum(dim=1, keepdim=True) - 1  # an id is kept if those before it do not have the share
        lowest_C = lowest_C.maximum(highest_CM.gather(1, last_C1)[:, 0])
        edges_C2 = torch.cat([before_CM.gather(1, last_C1), through_CM.gather(1, last_C1)], dim=1)
        sure_C &= ((edges_C2 - top_p).abs() >= near).all(dim=1)
    beside_C = lowest_C if last_two_C2 is None else lowest_C.where(lowest_C > last_two_C2[:, 1], last_two_C2[:, 0])
    return Truncation(lowest_C, beside_C, sure_C)


def log_softmax(logits: Tensor, distribution: Distribution) -> Tensor:
    """Returns [C, V], the log-probs of all ids; -inf for an id that is not kept. Only for few positions."""
    tempered_CV = logits / distribution.temperature
    if distribution.truncated:
        tempered_CV.masked_fill_(logits < truncation(logits, distribution).lowest[:, None], -torch.inf)
    return tempered_CV.log_softmax(dim=1)


class HeadScores(NamedTuple):
    """Log-probs, and optionally entropies, of the head for given ids."""

    logp: Tensor  # [K, N] one row per distribution
    entropy: Tensor | None  # [N] nats, of the last distribution
    sure: Tensor | None  # [N] bool, of the last distribution: see `Truncation`. None: it is not truncated


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    distributions: Sequence[Distribution],
    *,
    entropy: EntropyUse = "none",
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN,
    chunk: int | None = None,
) -> HeadScores:
    """Returns log-probs of `ids` under each of K distributions, from one computation of the logits.

    Processes the positions in chunks; backward recomputes the logits of each chunk instead of storing them.

    Args:
        hidden: [N, H]; `weight` and `bias` as in `LogitRule.logits`.
        ids: [N] long.
        distributions: of the logits after `softcap`. A truncation keeps `ids`, too, which have been sampled.
        entropy: `none`; `value`, without gradient; or `gradient`.
        chunk: positions per chunk; None: as many as give CHUNK_LOGITS logits.

    Returns:
        float32 (float64 for float64 input).
    """
    chunk = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    how = How(tuple(distributions), entropy, rule, chunk, hidden.dtype)
    logp, entropies, sure = ChunkedScores.apply(hidden, weight, bias, ids, how)
    return HeadScores(logp, None if entropy == "none" else entropies, sure if how.distributions[-1].truncated else None)


@torch.no_grad()
def softmax_errors(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    distributions: Sequence[Distribution],
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN,
) -> Tensor:
    """Returns log-probs of `ids`, and how much torch's own float32 `log_softmax` differs from them on the same logits.

    Engines use that function. On a CPU it errs by 1e-5 nats and more on peaked distributions over many ids.

    Returns:
        [2, K, N] float64: log-probs, of a softmax in float64; differences, 0 or more.
    """
    found, chunk = [], max(1, CHUNK_LOGITS // (4 * weight.shape[0]))
    for start in range(0, max(len(ids), 1), chunk):
        ids_C1 = ids[start : start + chunk, None]
        logits_CV, of_chunk = rule.logits(hidden[start : start + chunk], weight, bias), []
        for distribution in distributions:
            tempered_CV = logits_CV / distribution.temperature
            if distribution.truncated:
                gone_CV = truncation(logits_CV, distribution).dropped(logits_CV, ids_C1[:, 0])
                tempered_CV.masked_fill_(gone_CV, -torch.inf)
            exact_C = tempered_CV.double().log_softmax(1).gather(1, ids_C1)[:, 0]
            errors_C = tempered_CV.float().log_softmax(1).gather(1, ids_C1)[:, 0].double().sub(exact_C).abs()
            of_chunk.append(torch.stack((exact_C, errors_C)))
        found.append(torch.stack(of_chunk, dim=1))
    return torch.cat(found, dim=2)


@dataclass(frozen=True, slots=True)
class How:
    """The settings of `head_scores`, with the computations on one chunk of C positions."""

    distributions: tuple[Distribution, ...]
    entropy: EntropyUse
    rule: LogitRule
    chunk: int
    dtype: torch.dtype  # of the hidden states

    def gone(self, logits: Tensor, ids: Tensor) -> tuple[list[Tensor | None], Tensor]:
        """Returns [C, V] bool of each distribution, the ids that are not kept (None: all are), and `sure` of the last one."""
        kept = [truncation(logits, distribution, NEAR[self.dtype]) for distribution in self.distributions]
        pairs = zip(self.distributions, kept, strict=True)
        return [one.dropped(logits, ids) if distribution.truncated else None for distribution, one in pairs], kept[-1].sure

    def scores(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Returns [K, C] log-probs of the ids, [K, C] logsumexp of kept logits over the temperature, [C] entropies, [C] `sure`.

        Changes `logits` in place.
        """
        gone, sure_C = self.gone(logits, ids)
        # The maximum is subtracted first, as in log_softmax: logits minus logsumexp would lose digits in float32.
        peak_C1 = logits.amax(dim=1, keepdim=True)
        logits -= peak_C1
        logp, lse, entropy_C = [], [], None
        for k, (distribution, gone_CV) in enumerate(zip(self.distributions, gone, strict=True)):
            temperature = distribution.temperature
            tempered_CV = logits if temperature == 1.0 else logits / temperature
            if gone_CV is not None:
                tempered_CV = tempered_CV.masked_fill(gone_CV, DROPPED)
            picked_C = tempered_CV.gather(1, ids[:, None])[:, 0]
            last = k == len(self.distributions) - 1  # nothing else reads the logits
            odds_CV = tempered_CV.exp_() if last and self.entropy == "none" else tempered_CV.exp()
            total_C = odds_CV.sum(dim=1)
            logp.append(picked_C - total_C.log())
            lse.append(peak_C1[:, 0] / temperature + total_C.log())
        if self.entropy != "none":  # of the last distribution
            entropy_C = total_C.log() - odds_CV.mul_(tempered_CV).sum(dim=1) / total_C
        return torch.stack(logp), torch.stack(lse), entropy_C, sure_C

    def slope(self, logits: Tensor, ids: Tensor, lse: Tensor, entropy: Tensor, of_logp: Tensor, of_entropy: Tensor) -> Tensor:
        """Returns [C, V], the gradient with respect to hidden @ weight.T, given the gradients of log-probs and entropy.

        With p the probabilities at a temperature t and H their entropy, the gradients with respect to the logits z are
        d log p_i / d z_v = ([v = i] - p_v) / t and d H / d z_v = -p_v (log p_v + H) / t. Which ids are kept is a constant.
        Changes `logits` in place.
        """
        slopes, (gone, _) = [], self.gone(logits, ids)
        for k, distribution in enumerate(self.distributions):
            of_picked_C1, temperature = of_logp[k, :, None], distribution.temperature
            last = k == len(self.distributions) - 1
            # In one pass, and in place where nothing else reads the logits: this reads and writes all of [C, V].
            out = logits if last and self.rule.softcap is None else None
            logp_CV = torch.add(-lse[k, :, None], logits, alpha=1 / temperature, out=out)
            if (gone_CV := gone[k]) is not None:
                logp_CV.masked_fill_(gone_CV, DROPPED)
            if self.entropy == "gradient" and last:
                p_CV = logp_CV.exp()
                p_CV *= logp_CV.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(of_picked_C1)
                slopes.append(p_CV.scatter_add_(1, ids[:, None], -of_picked_C1).div_(-temperature))
            else:
                off_CV = logp_CV.exp_().scatter_add_(1, ids[:, None], logp_CV.new_full((len(ids), 1), -1.0))
                slopes.append(off_CV.mul_(of_picked_C1 / -temperature))
        slope_CV = functools.reduce(Tensor.add_, slopes)
        if self.rule.softcap is not None:
            slope_CV *= 1 - (logits / self.rule.softcap).square()
        return slope_CV if self.rule.scale == 1.0 else slope_CV.mul_(self.rule.scale)


class ChunkedScores(torch.autograd.Function):
    """Forward and backward of `head_scores`.

    Plain autograd would store several logit-sized tensors per chunk, and read them more often.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, how: How) -> tuple[Tensor, ...]:
        wide = head_dtype(hidden, fp32=True)
        logp_KN, lse_KN = hidden.new_empty(2, len(how.distributions), len(ids), dtype=wide)
        entropy_N, sure_N = hidden.new_zeros(len(ids), dtype=wide), hidden.new_ones(len(ids), dtype=torch.bool)
        states, matrix, offset = how.rule.factors(hidden, weight, bias)
        for start in range(0, len(ids), how.chunk):
            part = slice(start, start + how.chunk)
            logits_CV = how.rule.logits(states[part], matrix, offset)
            logp_KN[:, part], lse_KN[:, part], entropy_C, sure_N[part] = how.scores(logits_CV, ids[part])
            if entropy_C is not None:
                entropy_N[part] = entropy_C
        ctx.save_for_backward(hidden, weight, bias, ids, lse_KN, entropy_N)
        ctx.how = how
        ctx.mark_non_differentiable(*([sure_N] if how.entropy == "gradient" else [entropy_N, sure_N]))
        return logp_KN, entropy_N, sure_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, lse_KN, entropy_N = ctx.saved_tensors
        how: How = ctx.how
        summed = head_dtype(hidden, how.rule.fp32)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(given, dtype=summed) if needed else None
            for given, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        states, matrix, offset = how.rule.factors(hidden, weight, bias)
        for start in range(0, len(ids), how.chunk):
            part = slice(start, start + how.chunk)
            logits_CV = how.rule.logits(states[part], matrix, offset)
            slope_CV = how.slope(logits_CV, ids[part], lse_KN[:, part], entropy_N[part], of_logp[:, part], of_entropy[part])
            slope_CV = factor(slope_CV, hidden.dtype, how.rule.fp32)
            if of_hidden is not None:
                add_product(of_hidden[part], slope_CV, matrix)
            if of_weight is not None:
                add_product(of_weight, slope_CV.T, states[part])
            if of_bias is not None:
                of_bias += slope_CV.sum(dim=0, dtype=summed)
            del logits_CV, slope_CV  # before the next chunk's are made
        gradients = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return *(None if slope is None else slope.to(given.dtype) for slope, given in gradients), None, None


def factor(given: Tensor, dtype: torch.dtype, fp32: bool) -> Tensor:
    """Returns a factor of the head's products: `given`, rounded to `dtype`.

    CUDA multiplies rounded factors and adds up in float32 (`out_dtype`). The CPU has no such product: for `fp32` the rounded
    values are returned in float32, which gives the same.
    """
    rounded = given.to(dtype)
    return rounded if rounded.is_cuda else rounded.to(head_dtype(rounded, fp32))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    with torch.autocast(total.device.type, enabled=False):
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def head_dtype(hidden: Tensor, fp32: bool) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32) if fp32 else hidden.dtype
