"""Rows about single kernels: what the device can do at most, the head, and attention."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from gpu_rows.measure import copy_rate, device_name, matmul_rate, peak_of, seconds_of
from gpu_rows.models import LARGE, SMALL
from gpu_rows.record import GIB, Finding, Place, Value, judged

MIB = 1 << 20
HEAD_MEMORY = 1 / 8  # chunks may take this share of what all logits at once take
HEAD_AGREES = 0.02  # nats, of log-probs from the same bfloat16 factors; and the share of the gradient's norm
ATTENTION_MEMORY = 1 / 2  # the kernel that is chosen may take this share of what scores of all pairs take


def device(place: Place) -> Finding:
    """The rate of a large product and of a copy: what the rates of other rows are compared with."""
    values = [
        Value("bfloat16 product", matmul_rate(place.device) / 1e12, "TFLOP/s"),
        Value("copy, bytes read and written", copy_rate(place.device) / 1e9, "GB/s"),
    ]
    numbers: dict[str, Any] = {"device": device_name(place.device), "float32_products": torch.get_float32_matmul_precision()}
    if place.gpu:
        properties = torch.cuda.get_device_properties(0)
        values.append(Value("memory", properties.total_memory / GIB, "GiB"))
        numbers |= {"cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}"}
    else:
        values.append(Value("threads", torch.get_num_threads(), ""))
    return judged(values, device_name(place.device), numbers)


def head(place: Place) -> Finding:
    """The head in chunks, forward and backward, beside the computation of all logits at once, from the same factors."""
    from rlgen.losses.logp import head_scores
    from rlgen.types import WHOLE

    shape = LARGE if place.gpu else {**SMALL, "vocab_size": 8192}
    tokens, hidden_size, vocabulary = (8192 if place.gpu else 1024), shape["hidden_size"], shape["vocab_size"]
    chunk = None if place.gpu else 32  # a rehearsal's logits would fit into one chunk
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(place.device, torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator).mul_(0.06).to(place.device).requires_grad_()
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator).to(place.device)

    def chunked() -> torch.Tensor:
        return head_scores(hidden, weight, ids, (WHOLE,), chunk=chunk).logp[0]

    def at_once() -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype)).float()
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    found = {name: measured(run, (hidden, weight), place.device) for name, run in (("chunked", chunked), ("at once", at_once))}
    (seconds, most, logp, gradients), (once_seconds, once_most, once_logp, once_gradients) = found.values()
    off = max(((one - other).norm() / other.norm()).item() for one, other in zip(gradients, once_gradients, strict=True))
    products = 8 * tokens * hidden_size * vocabulary  # forward, again in the backward pass, and two of the backward pass
    values = [
        Value("forward and backward", 1e3 * seconds, "ms"),
        Value("its matrix products", products / seconds / 1e12, "TFLOP/s"),
        Value("time ÷ that of all logits at once", seconds / once_seconds, "×"),
        Value("memory ÷ that of all logits at once", most / once_most, "×", most=HEAD_MEMORY),
        Value(
            "log-probs: max |Δ| to those from computing all logits at once",
            (logp - once_logp).abs().max().item(),
            "nats",
            most=4 * HEAD_AGREES,
        ),
        Value("gradients: ‖Δ‖/‖g‖ to those from computing all logits at once", off, "", most=HEAD_AGREES),
    ]
    numbers = {"mib": most / MIB, "at_once_mib": once_most / MIB, "at_once_ms": 1e3 * once_seconds}
    return judged(values, f"{tokens} tokens, vocabulary {vocabulary}, hidden size {hidden_size}, bfloat16", numbers)


def measured(run: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], device: str) -> tuple[Any, ...]:
    """Returns seconds and bytes of forward and backward, the outputs, and the gradients of a weighted mean of them."""
    kept: list[torch.Tensor] = []

    def once() -> None:
        for one in inputs:
            one.grad = None
        outputs = run()
        signs = torch.linspace(-1, 1, outputs.numel(), device=outputs.device).view_as(outputs)
        (signs * outputs).mean().backward()
        kept[:] = [outputs.detach()]

    seconds = seconds_of(once, device, repeats=5 if device != "cpu" else 3, warm=1)
    for one in inputs:
        one.grad = None
    most = peak_of(once, device).most
    gradients = [one.grad.double().cpu() for one in inputs if one.grad is not None]
    return seconds, most, kept.pop().float().cpu(), gradients


def attention(place: Place) -> Finding:
    """Attention as the trainer calls it, forward and backward, with the kernel that torch chooses and with each one by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    shape = LARGE if place.gpu else SMALL
    rows, length = (16, 1024) if place.gpu else (2, 256)
    heads, groups, size = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True, training=False)

    def inputs() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        counts = (heads, groups, groups)
        states = [torch.randn(rows, count, length, size, generator=generator) for count in counts]
        return tuple(one.to(place.device, torch.bfloat16).requires_grad_() for one in states)

    given = inputs()

    def run() -> torch.Tensor:
        output: torch.Tensor = sdpa_attention_forward(layer, *given, attention_mask=None, scaling=size**-0.5)[0]
        return output

    products = 7 * rows * heads * length**2 * size  # causal: half of 2 products forward and 5 backward, of 2 operations each
    kinds = [kind for name, kind in SDPBackend.__members__.items() if name not in ("ERROR", "OVERRIDEABLE")]
    numbers: dict[str, Any] = {}
    for kind in kinds:
        with sdpa_kernel([kind]):
            try:
                seconds, most, _, _ = measured(run, given, place.device)
            except RuntimeError as error:  # this kernel does not take these shapes here
                numbers[kind.name.lower()] = str(error).splitlines()[0]
                continue
        numbers[kind.name.lower()] = {"ms": 1e3 * seconds, "mib": most / MIB}
    seconds, most, output, _ = measured(run, given, place.device)
    with sdpa_kernel([SDPBackend.MATH]):
        _, math_most, wanted, _ = measured(run, given, place.device)
    values = [
        Value("chosen kernel, forward and backward", 1e3 * seconds, "ms"),
        Value("its matrix products", products / seconds / 1e12, "TFLOP/s"),
        Value("its memory ÷ that of a full score matrix", most / math_most, "×", most=ATTENTION_MEMORY),
        Value("its output: max |Δ| to that of a full score matrix", (output - wanted).abs().max().item(), "", most=0.05),
    ]
    timed = ", ".join(f"{name} {one['ms']:.2f} ms" for name, one in numbers.items() if isinstance(one, dict))
    return judged(values, f"{rows} rows of {length} tokens, {heads} heads of {size}, bfloat16; by name: {timed}", numbers)
