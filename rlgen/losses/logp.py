"""Log-probs of given ids from hidden states, without ever holding [positions, vocabulary] whole."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def head_logp(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperatures: tuple[float, ...],
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    fp32: bool = True,
    chunk: int | None = None,
) -> Tensor:
    """Log-probs of `ids` over the full vocabulary, at each of K temperatures, from one computation of the logits.

    Positions go through in chunks. With more than one chunk, backward computes each chunk's logits again instead of
    keeping them.

    Args:
        hidden: [N, H]; `weight`, `bias`, `softcap`, `scale`, `fp32` as in `head_logits`.
        ids: [N] long.
        temperatures: divide the logits, after `softcap`.
        chunk: positions at once; None: as many as make CHUNK_LOGITS logits.

    Returns:
        [K, N] float32 (float64 for float64 input).
    """
    # Cast once, not once a chunk.
    weight = weight.to(head_dtype(hidden, fp32))

    def chunk_logp(hidden_CH: Tensor, ids_C: Tensor) -> Tensor:
        logits_CV = head_logits(hidden_CH, weight, bias=bias, softcap=softcap, scale=scale, fp32=fp32)
        # log_softmax subtracts the maximum first; logits minus logsumexp would lose digits in float32.
        logp_KC1 = [(logits_CV / t).log_softmax(dim=-1).gather(1, ids_C[:, None]) for t in temperatures]
        return torch.stack(logp_KC1).squeeze(-1)

    chunk = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    if hidden.shape[0] <= chunk:
        return chunk_logp(hidden, ids)
    parts = zip(hidden.split(chunk), ids.split(chunk), strict=True)
    # Nothing here is random, hence no generator state to preserve.
    return torch.cat([checkpoint(chunk_logp, *part, use_reentrant=False, preserve_rng_state=False) for part in parts], dim=1)


def head_dtype(hidden: Tensor, fp32: bool) -> torch.dtype:
    """The dtype in which the head multiplies."""
    return torch.promote_types(hidden.dtype, torch.float32) if fp32 else hidden.dtype
