"""Log-probs and entropies from hidden states, without ever holding [positions, vocabulary] whole."""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

EntropyUse: TypeAlias = Literal["none", "value", "gradient"]

# Logits computed at once, in elements: 128 MiB in float32, 220 positions of a vocabulary of 152k.
CHUNK_LOGITS = 2**25


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    fp32: bool = True,
) -> Tensor:
    """softcap(scale * (hidden @ weight.T + bias)), where softcap(z) = softcap * tanh(z / softcap).

    Args:
        hidden: [N, H].
        weight: [V, H], bias: [V]; cast to the dtype of the product.
        fp32: compute the product in float32 (float64 stays); else in the dtype of `hidden`.

    Returns:
        [N, V] float32 (float64 for float64 input). An autocast around the call has no effect.
    """
    dtype = head_dtype(hidden, fp32)
    with torch.autocast(hidden.device.type, enabled=False):
        logits_NV = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits_NV = scale * logits_NV.to(torch.promote_types(dtype, torch.float32))
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


class HeadScores(NamedTuple):
    """What a head says about given ids."""

    logp: Tensor  # [K, N] one row a temperature
    entropy: Tensor | None  # [N] nats, of the distribution at the last temperature


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperatures: tuple[float, ...],
    *,
    entropy: EntropyUse = "none",
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    fp32: bool = True,
    chunk: int | None = None,
) -> HeadScores:
    """Log-probs of `ids` over the full vocabulary, at each of K temperatures, from one computation of the logits.

    Positions go through in chunks. With more than one chunk, backward computes each chunk's logits again instead of
    keeping them.

    Args:
        hidden: [N, H]; `weight`, `bias`, `softcap`, `scale`, `fp32` as in `head_logits`.
        ids: [N] long.
        temperatures: divide the logits, after `softcap`.
        entropy: `none`; `value`, without gradient; or `gradient`.
        chunk: positions at once; None: as many as make CHUNK_LOGITS logits.

    Returns:
        float32 (float64 for float64 input).
    """
    # Cast once, not once a chunk.
    weight = weight.to(head_dtype(hidden, fp32))

    def score_chunk(hidden_CH: Tensor, ids_C: Tensor) -> tuple[Tensor, Tensor | None]:
        logits_CV = head_logits(hidden_CH, weight, bias=bias, softcap=softcap, scale=scale, fp32=fp32)
        # log_softmax subtracts the maximum first; logits minus logsumexp would lose digits in float32.
        logp_KCV = [(logits_CV if t == 1.0 else logits_CV / t).log_softmax(dim=-1) for t in temperatures]
        logp_KC = torch.stack([logp_CV.gather(1, ids_C[:, None])[:, 0] for logp_CV in logp_KCV])
        if entropy == "none":
            return logp_KC, None
        last_CV = logp_KCV[-1] if entropy == "gradient" else logp_KCV[-1].detach()
        return logp_KC, -(last_CV.exp() * last_CV).sum(dim=-1)

    chunk = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    if hidden.shape[0] <= chunk:
        return HeadScores(*score_chunk(hidden, ids))
    parts = zip(hidden.split(chunk), ids.split(chunk), strict=True)
    # Nothing here is random, hence no generator state to preserve.
    scored = [checkpoint(score_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    logp = torch.cat([logp_KC for logp_KC, _ in scored], dim=1)
    return HeadScores(logp, None if entropy == "none" else torch.cat([entropy_C for _, entropy_C in scored]))


def head_dtype(hidden: Tensor, fp32: bool) -> torch.dtype:
    """The dtype in which the head multiplies."""
    return torch.promote_types(hidden.dtype, torch.float32) if fp32 else hidden.dtype
