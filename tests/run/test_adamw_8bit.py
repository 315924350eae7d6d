"""AdamW with moments of 8 bits, by the real bitsandbytes. With it in .venv, each import of peft would take a second longer."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.packages import installed
from helpers.recipes import problems, written
from recipe.mistakes import RECIPE
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW, Optimizer

from rlgen.cli.train import train_command
from rlgen.errors import SetupError
from rlgen.run.state import load_optimizer, optimizer_tensors
from rlgen.setup.train_state import adamw_8bit

BITSANDBYTES = "0.50.2"


@pytest.fixture(scope="module")
def bitsandbytes() -> Iterator[None]:
    folder = installed(f"bitsandbytes-{BITSANDBYTES}", "--no-deps", f"bitsandbytes=={BITSANDBYTES}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def opened() -> tuple[nn.Linear, Optimizer]:
    """A matrix that is large enough for 8 bits, and a bias that keeps 32."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    return model, adamw_8bit(list(model.parameters()), 0.01, 0.1)


def update(model: nn.Linear, optimizer: Optimizer, at: int) -> None:
    inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(at))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_it_is_adamw_and_goes_on_with_the_same_bits(bitsandbytes: None, tmp_path: Path) -> None:
    (model, optimizer), (exact, _) = opened(), opened()
    reference = AdamW(exact.parameters(), lr=0.01, weight_decay=0.1)
    for at in range(2):
        update(model, optimizer, at)
        update(exact, reference, at)
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    assert optimizer.state[model.bias]["state1"].dtype == torch.float32
    assert (model.weight - exact.weight).abs().mean() < 0.05 * 2 * 0.01, "a twentieth of what two updates move"

    again, other = opened()
    again.load_state_dict(model.state_dict())
    tensors = {name: tensor.contiguous().clone() for name, tensor in optimizer_tensors(model, optimizer).items()}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    load_optimizer(load_file(tmp_path / "optimizer.safetensors"), again, other)
    for one, its in ((model, optimizer), (again, other)):
        update(one, its, 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), model.parameters(), strict=True))
    assert other.state[again.weight]["step"] == 3


@pytest.mark.slow
def test_a_run_resumes_to_the_last_bit(bitsandbytes: None, recipe_file: Path) -> None:
    settings = ["engine={kind: transformers}", "optim={kind: adamw_8bit, learning_rate: 1.0e-3}", "checkpoint.every=1"]
    folders = [recipe_file.parent / name for name in ("whole", "parts")]
    for folder, steps, resume in ((folders[0], 3, False), (folders[1], 2, False), (folders[1], 3, True)):
        train_command(recipe_file, [*settings, f"run.steps={steps}"], resume, False, None, folder)
    first, last = (load_file(folders[0] / f"checkpoints/step_00000{step}/state/optimizer.safetensors") for step in (2, 3))
    eight = [name for name, tensor in last.items() if tensor.dtype == torch.uint8]
    assert eight and any(not torch.equal(first[name], last[name]) for name in eight)
    for name in ("model.safetensors", "state/optimizer.safetensors"):
        whole, parts = ((folder / "checkpoints/step_000003" / name).read_bytes() for folder in folders)
        assert whole == parts


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(SetupError, match=r'optim.kind: adamw_8bit needs .* pip install "rlgen\[bitsandbytes\]"'):
        opened()


def test_shards_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE.replace("RUNS", "runs") + "processes: {strategy: fsdp}\noptim: {kind: adamw_8bit}\n")
    assert any("set optim.kind to adamw, or processes.strategy to ddp" in line for line in problems(path))
