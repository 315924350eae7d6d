"""A causal language model as rlgen uses it: ids in, log-probs of the completion's tokens out."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlgen.errors import SetupError
from rlgen.losses.logp import head_logits, head_logp
from rlgen.types import Batch


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logits: softcap(scale * (hidden @ weight.T + bias))."""

    model: PreTrainedModel
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Head":
        """Raises SetupError if the model computes its logits in a way that rlgen does not know."""
        config = model.config.get_text_config()
        # Each architecture has its own name for the same two things; `check_head` proves the reading right.
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        head = cls(model, float(scale), getattr(config, "final_logit_softcapping", None))
        check_head(model, head)
        return head

    @property
    def weight(self) -> Tensor:
        """[V, H]: the tensor itself, so that a tied head gives its gradient to the embedding."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.model.get_output_embeddings().bias
        return bias

    def logits(self, hidden: Tensor, fp32: bool) -> Tensor:
        """[N, H] -> [N, V] float32. For a few positions only."""
        return head_logits(hidden, self.weight, bias=self.bias, softcap=self.softcap, scale=self.scale, fp32=fp32)

    def logp(self, hidden: Tensor, ids: Tensor, temperatures: tuple[float, ...], fp32: bool) -> Tensor:
        """[N, H], [N] -> [K, N] float32 log-probs of `ids`, one row a temperature; [N, V] is never held whole."""
        return head_logp(
            hidden,
            self.weight,
            ids,
            temperatures,
            bias=self.bias,
            softcap=self.softcap,
            scale=self.scale,
            fp32=fp32,
        )


@torch.no_grad()
def check_head(model: PreTrainedModel, head: Head) -> None:
    """Compares `head` with the model's own logits on eight ids.

    Raises:
        SetupError: they differ, so log-probs would be those of another model.
    """
    ids = torch.arange(3, 11, device=model.device)[None]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    own = model(input_ids=ids, use_cache=False).logits.float()
    gap = (head.logits(hidden[0], fp32=model.dtype == torch.float32) - own[0]).abs().max().item()
    bound = 1e-4 if model.dtype == torch.float32 else 0.1
    if not gap <= bound * max(1.0, own.abs().max().item()):
        raise SetupError(
            f"model.path: {type(model).__name__} computes its logits in a way rlgen does not know (they differ by {gap:.2g})"
        )


class Policy(nn.Module):
    """The model that is trained, or a frozen one to compare with.

    Args:
        model: a causal language model; its weights stay in their own dtype (float32 for the one that is trained).
        dtype: of the forward's activations.
        fp32_head: compute logits in float32 whatever `dtype`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, fp32_head: bool) -> None:
        super().__init__()
        self.model = model
        self.head = Head.of(model)
        self.dtype = dtype
        self.fp32_head = fp32_head

    def forward(self, batch: Batch, temperatures: tuple[float, ...]) -> Tensor:
        """Log-probs of the completion's tokens.

        Args:
            batch: B rows; padding is on the right, so that causal attention alone keeps it out and no mask is needed.
            temperatures: K of them; the logits are computed once.

        Returns:
            [K, B, T] float32, 0 where the mask is false.
        """
        device = batch.input_ids.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_BSH = self.model.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows, columns = batch.mask.nonzero(as_tuple=True)
        # The logits at a position predict the next id: the only shift by one in rlgen.
        hidden_NH = hidden_BSH[rows, batch.prompt_lengths[rows] - 1 + columns].to(self.dtype)
        logp_KN = self.head.logp(hidden_NH, batch.completion_ids[rows, columns], temperatures, self.fp32_head)
        empty = torch.zeros(len(temperatures), *batch.mask.shape, device=device)
        return empty.index_put((torch.arange(len(temperatures), device=device)[:, None], rows, columns), logp_KN)
