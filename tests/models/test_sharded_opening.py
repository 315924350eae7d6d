"""A sharded run opens its model shard by shard: with the values of `from_pretrained`, and with the memory of its shards."""

import re
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel_worker
import pytest
import sharded_opening_worker
import torch
import torch.distributed as dist
from helpers.samples import TEXTS
from helpers.slow import slow_but
from helpers.torchrun import launch, torchrun, well
from sharded_opening_worker import sharded
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, OlmoHybridConfig, PreTrainedModel, Qwen3Config

from rlgen.engines.transfer import FILE_BYTES
from rlgen.errors import ProcessError, SetupError
from rlgen.files import read_json
from rlgen.models.dither import dither
from rlgen.models.lora import adapter_tensors
from rlgen.models.parallel import ContextParallel, plan_of_layers
from rlgen.models.parts import part, part_of_stored
from rlgen.models.policy import Policy
from rlgen.models.sharding import GATHERING, Meshes, read_by_slices
from rlgen.models.tiny import ARCHITECTURES, build_tiny
from rlgen.models.weights import base_digest, own_tensors
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.run.state import load_model_weights, written_here
from rlgen.setup.policy import build_policy, build_shards
from rlgen.setup.settings import TrainSettings

MIB = 1 << 20
QUICK = ["qwen3", "llama", "qwen3_moe", "gpt2"]  # a tied head and one of its own, experts that are stacked, other names
WHOLE = "converted from whole tensors"


def olmo_hybrid(folder: Path) -> Path:
    """A model whose layers join tensors of the checkpoint by rows, so that they cannot be read by slices."""
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    config = OlmoHybridConfig(**sizes, linear_value_head_dim=16, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def group_of(rank: int, world: int) -> Processes:
    return Processes(rank=rank, world=world, device=torch.device("cpu"), timeout=1, group=None, store=None)


@pytest.mark.parametrize("method", GATHERING)
def test_what_gathers_shards_takes_an_argument(method: str) -> None:
    """On a GPU, FSDP2 moves the arguments of each call to the device, and fails where there are none (measured on an H200)."""
    _, *others = signature(getattr(Policy, method)).parameters.values()
    assert [one for one in others if one.default is one.empty]


@pytest.fixture
def as_last_of() -> Iterator[Callable[[int], Processes]]:
    """Makes this process the last of several that cannot talk to each other. torch remembers its rank in a group of this size."""

    def join(world: int) -> Processes:
        dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
        return group_of(world - 1, world)

    yield join
    dist.destroy_process_group()


def opened(folder: Path, what: str, *arguments: object, world: int = 2) -> Any:
    """What several processes have found."""
    output = folder / "found.json"
    # Freed tensors go back to the system at once, so that memory is what is held: glibc would keep those below 32 MB.
    words = (sharded_opening_worker.__file__, what, output, *arguments)
    well(launch(*words, launcher=torchrun(world), timeout=400, MALLOC_MMAP_THRESHOLD_="65536"))
    return read_json(output)


def in_shards(folder: object, meshes: Meshes, say: Callable[[str], object] = print) -> PreTrainedModel:
    recipe = sharded(str(folder), model={"gradient_checkpointing": True})
    return build_shards(TrainSettings.of(recipe, str(folder)), meshes, True, say).model


def loaded_whole(folder: Path) -> dict[str, Tensor]:
    """What `from_pretrained` loads, tied tensors twice."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters(remove_duplicate=False))


def rows_of_last(full: Tensor, world: int) -> Tensor:
    """What the last rank holds of a tensor: what is left when all others have as many rows, rounded up."""
    return full.detach()[(world - 1) * -(-len(full) // world) :]


@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, *QUICK))
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_reads_its_rows_of_each_tensor(name: str, world: int, as_last_of: Callable[[int], Processes]) -> None:
    folder, said = build_tiny(name), list[str]()
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    full = dict(expected.named_parameters(remove_duplicate=False))
    model = in_shards(folder, Meshes.of(as_last_of(world)), said.append)
    own = dict(model.named_parameters(remove_duplicate=False))
    assert own.keys() == full.keys()
    for key, shard in own.items():
        rows = rows_of_last(full[key], world)
        assert isinstance(shard, DTensor) and shard.dtype == rows.dtype and torch.equal(part(shard), rows), key
    buffers, others = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == others.keys() and all(torch.equal(buffers[key], others[key]) for key in others)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (expected.get_input_embeddings().weight is expected.get_output_embeddings().weight)
    # Sharded as a part of its own, a tied weight would be gathered for the head from a copy that no update reaches.
    assert isinstance(model.get_input_embeddings(), FSDPModule) != tied
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    assert layers and all(layer.gradient_checkpointing and layer.training for layer in layers), "they compute activations again"
    merged = name in {"mixtral", "glm4_moe"}  # four experts, each a tensor of its own in the file
    assert bool(said) == (merged and world == 3), "of four experts a third process would hold none"


def test_neighbours_wait_no_longer_than_all_processes(
    as_last_of: Callable[[int], Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits half an hour in groups of its own."""
    found: list[tuple[float, int]] = []
    monkeypatch.setattr(
        "rlgen.models.sharding._set_pg_timeout", lambda within, group: found.append((within.total_seconds(), group.size()))
    )
    processes = as_last_of(4)
    Meshes.of(processes, 2, tensor=4)
    assert found == [(processes.timeout, size) for size in (2, 2, 1, 4)] and processes.timeout > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_process_reads_its_experts(name: str, count: int, as_last_of: Callable[[int], Processes]) -> None:
    """The last of four: with two that share the experts, the other two hold the same ones, and half of each."""
    full = loaded_whole(build_tiny(name))
    model = in_shards(build_tiny(name), Meshes.of(as_last_of(4), experts=count))
    for key, shard in model.named_parameters():
        assert torch.equal(part(shard), rows_of_last(full[key], 4)), key
        assert (part(shard).ndim == 3) == ("experts." in key) == (shard.device_mesh.ndim == 2), key


@pytest.mark.parametrize("name", ["qwen3", "phi3"])  # queries, keys and values in three tensors, and in one
def test_a_process_reads_its_part_of_each_layer(name: str, as_last_of: Callable[[int], Processes]) -> None:
    """The last of four, of which two pairs split each layer. A part is a slice, as checkpoints need."""
    full = loaded_whole(build_tiny(name))
    model = in_shards(build_tiny(name), Meshes.of(as_last_of(4), tensor=2))
    assert any(shard.placements[-1] == Shard(1) for shard in model.parameters())
    for key, shard in model.named_parameters():
        assert part(shard).numel() == full[key].numel() // (2 if full[key].ndim == 1 else 4), key
        assert torch.equal(part(shard), part_of_stored(full[key].detach(), shard)), key


@pytest.mark.parametrize(
    ("name", "way", "count", "said"),
    [
        ("gpt2", "tensor", 2, "cannot split the layers of GPT2LMHeadModel; remove it"),
        ("qwen3_moe", "tensor", 2, "cannot split the layers of Qwen3MoeForCausalLM; remove it"),
        ("qwen3", "tensor", 4, "Qwen3ForCausalLM over 4 processes: num_key_value_heads is 2; set it to a divisor of that"),
        ("qwen3", "experts", 2, "cannot divide the experts of Qwen3ForCausalLM; remove it"),
        ("mixtral", "experts", 8, "Cannot evenly shard 4 experts across 8 .*; set it to another number"),
    ],
)
def test_layers_and_experts_that_cannot_be_divided_are_refused(
    name: str, way: str, count: int, said: str, as_last_of: Callable[[int], Processes]
) -> None:
    meshes = Meshes.of(as_last_of(8), **{way: count})
    with pytest.raises(SetupError, match=f"processes.{way}: transformers .* {said}"):
        in_shards(build_tiny(name), meshes)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("apertus", torch.float32, "leaves out model.layers.0.mlp.act_fn.alpha_p, which would get a part of its gradient"),
        ("starcoder2", torch.bfloat16, "in half precision model.layers.0.self_attn.o_proj.bias would be added"),
        ("gemma3n_text", torch.float32, "intermediate_size is "),
    ],
)
def test_layers_whose_gradients_would_be_wrong_are_refused(name: str, dtype: torch.dtype, said: str) -> None:
    """Measured: the gradients of Apertus' activation were off by twenty times their size."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name))
    with pytest.raises(SetupError, match=f"processes.tensor: .*{re.escape(said)}"):
        plan_of_layers(model, 2, dtype)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1; set it to a divisor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depends on the longest row"),
    ],
)
def test_tokens_that_cannot_be_shared_out_are_refused(config: dict[str, Any], said: str) -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=1, **config))
    with pytest.raises(SetupError, match=f"processes.context: .*{said}"):
        ContextParallel.of(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "world", "size", "least"),
    [("tensor", 2, 2, 30), ("tensor", 4, 2, 30), ("tensor", 4, 4, 2), ("context", 2, 2, 20), ("context", 4, 4, 1)],
)
def test_processes_that_compute_together_have_the_gradient_of_one(
    tmp_path: Path, way: str, world: int, size: int, least: int
) -> None:
    """Of every tensor of every model that can be divided, relative to its largest element."""
    output, names = tmp_path / "found.json", [name for name in ARCHITECTURES if size == 2 or name == "gpt_neox"]
    asked = [f"{way}:{size}:{name}" for name in names]
    well(launch(parallel_worker.__file__, output, *asked, launcher=torchrun(world), timeout=600))
    measured = read_json(output)
    found = {case: of_model for case, of_model in measured["apart"].items() if isinstance(of_model, dict)}
    assert len(found) >= least
    assert max(max(of_model.values()) for of_model in found.values()) < 1e-5
    assert all(ours == theirs for ours, theirs in measured["digests"])
    for whole, *shares in measured["kept"].values():  # of one row, whose tokens are shared out
        assert len(shares) == world and max(shares) < 1.4 * whole / size


@pytest.mark.real
def test_three_processes_have_the_gradient_of_one_on_a_pretrained_model(real_model: Path, tmp_path: Path) -> None:
    """It rounds more than a toy: they are as near as packed rows are to padded ones in one process."""
    policy = build_policy(TrainSettings.of(sharded(str(real_model)), str(real_model), TEXTS), torch.device("cpu"))
    grads = list[dict[str, Tensor]]()
    for pack in (False, True):
        policy.zero_grad()
        policy.unpack("")
        assert not pack or policy.pack(TEXTS) is None
        batches = [parallel_worker.batch_of(rank) for rank in range(3)]
        grads.append({name: grad.clone() for name, grad in parallel_worker.gradient(policy, batches)})
    noise, output = max(parallel_worker.farthest(grads[1].items(), grads[0]).values()), tmp_path / "found.json"
    asked = [f"tensor:3:{real_model}", f"context:3:{real_model}"]
    well(launch(parallel_worker.__file__, output, *asked, launcher=torchrun(3), timeout=900))
    found = {case: max(of_model.values()) for case, of_model in read_json(output)["apart"].items()}
    print({case.partition("/")[0]: f"{apart:.1e}" for case, apart in found.items()}, f"packed beside padded: {noise:.1e}")
    assert len(found) == 3 and max(found.values()) < 1.5 * noise < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_dither_is_the_same_for_all_shards(name: str, tmp_path: Path, as_last_of: Callable[[int], Processes]) -> None:
    AutoModelForCausalLM.from_pretrained(build_tiny(name), dtype=torch.bfloat16).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    dither(expected, 1)
    model = in_shards(tmp_path, Meshes.of(as_last_of(4), experts=2 if name == "qwen3_moe" else None))
    dither(model, 1)
    full, changed = dict(expected.named_parameters()), 0
    for key, shard in model.named_parameters():
        assert torch.equal(part(shard), rows_of_last(full[key], 4)), key
        changed += int((part(shard) != part(shard).to(torch.bfloat16)).sum())
    assert changed > 1000


@pytest.mark.parametrize("name", QUICK)
def test_a_checkpoint_is_restored_by_rows(name: str, tmp_path: Path, as_last_of: Callable[[int], Processes]) -> None:
    saved = AutoModelForCausalLM.from_pretrained(build_tiny(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    saved.save_pretrained(tmp_path)
    full = dict(saved.named_parameters())
    model = in_shards(build_tiny(name), Meshes.of(as_last_of(2)))
    load_model_weights(tmp_path, model)
    for key, shard in model.named_parameters():
        assert torch.equal(part(shard), rows_of_last(full[key], 2)), key


def test_an_adapter_is_whole_over_a_base_in_shards(as_last_of: Callable[[int], Processes]) -> None:
    """peft would make adapters for the shards of a sharded layer."""
    folder = str(build_tiny("qwen3"))
    plain = sharded(folder)
    recipe = plain.model_copy(update={"model": plain.model.model_copy(update={"lora": LoraRecipe(rank=4)})})
    expected = adapter_tensors(build_policy(TrainSettings.of(recipe, folder, TEXTS), torch.device("cpu")).model)
    model = build_shards(TrainSettings.of(recipe, folder), Meshes.of(as_last_of(2)), True, print).model
    own = adapter_tensors(model)
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(own)
    assert all(isinstance(tensor, DTensor) for tensor in own_tensors(model).values())
    whole = build_policy(TrainSettings.of(plain, folder, TEXTS), torch.device("cpu")).model
    assert base_digest(model, gather=False) != base_digest(whole)


@pytest.mark.parametrize(("world", "count", "writes"), [(2, None, True), (4, 2, False)])
def test_of_equal_shards_the_first_are_written(
    world: int, count: int | None, writes: bool, as_last_of: Callable[[int], Processes]
) -> None:
    """Process 3 of [[0, 1], [2, 3]] holds the shards of process 1."""
    mesh = Meshes.of(as_last_of(world), count)
    assert mesh.shard.mesh.tolist() == ([0, 1] if count is None else [[0, 1], [2, 3]])
    shards = dict(in_shards(build_tiny("qwen3"), mesh).named_parameters())
    written = written_here(shards | {"whole": torch.zeros(1)}, is_main=False)
    assert set(written) == (set(shards) if writes else set())


def test_processes_that_cannot_be_divided_are_refused(as_last_of: Callable[[int], Processes]) -> None:
    with pytest.raises(ProcessError, match=r"processes\.shard 2 needs a multiple of 2 processes, but 3 run"):
        Meshes.of(group_of(0, 3), 2)
    with pytest.raises(ProcessError, match="experts 3 needs a multiple of 3 processes, but 8 run"):
        Meshes.of(as_last_of(8), experts=3)


def without_values(folder: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def test_what_can_be_read_by_slices(tmp_path: Path) -> None:
    experts = without_values(build_tiny("mixtral"))  # four of them
    assert [read_by_slices(experts, count) for count in (1, 2, 3, 4, 5)] == [True, True, False, True, False]
    assert read_by_slices(without_values(build_tiny("qwen3")), 64)
    assert not read_by_slices(without_values(olmo_hybrid(tmp_path)), 2)


@pytest.mark.slow
def test_two_processes_open_what_from_pretrained_loads(tmp_path: Path) -> None:
    """Policy and reference, after the forward pass that checks the head."""
    folders = {str(build_tiny(name)) for name in ARCHITECTURES}
    whole = str(olmo_hybrid(tmp_path / "olmo_hybrid"))
    found = opened(tmp_path, "tensors", *folders, whole)
    assert found.keys() == folders | {whole}
    for folder, of_model in found.items():
        assert (of_model["policy"], of_model["reference"]) == ([], []), folder
        assert (of_model["trained"], of_model["frozen"]) == ([True], [False]), folder
        assert [WHOLE in line for line in of_model["said"]] == ([True, True] if folder == whole else []), folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A model of 425 MB in float32, its bytes, and those of its largest tensor.

    It is saved in bfloat16, so that what is read is not a view of the file. It is deep and narrow, as large models are beside
    their shards: the forward pass that checks the head gathers embedding and layers, and gloo does that through two buffers.
    """
    shape = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 60, "head_dim": 64}
    config = Qwen3Config(**shape, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1)
    model, folder = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("large")
    model.save_pretrained(folder)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) > 400e6
    return folder, sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("models", [1, 2], ids=["policy", "policy and reference"])
def test_opening_takes_the_memory_of_the_shards(large: tuple[Path, int, int], tmp_path: Path, models: int) -> None:
    folder, size, largest = large
    shards = models * size // 2
    for of_process in opened(tmp_path, "memory", build_tiny("qwen3"), folder, 0.1 * (models - 1)):
        print({key: value // MIB for key, value in of_process.items()}, shards // MIB, largest // MIB)
        assert shards <= of_process["peak"] <= 1.25 * (shards + largest)
        assert of_process["held"] <= 1.15 * shards


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_sync_takes_two_buckets(large: tuple[Path, int, int], tmp_path: Path, world: int) -> None:
    """No process holds the model: weights are rounded, gathered tensor by tensor, and written while the next are gathered."""
    folder, size, largest = large
    main, *others = opened(tmp_path, "sync", build_tiny("qwen3"), folder, world=world)
    print({key: value // MIB for key, value in main.items()}, [one["peak"] // MIB for one in others], size // MIB)
    assert size / 2 > 3 * FILE_BYTES, "in bfloat16 it is more than three files"
    assert main["peak"] <= 2 * FILE_BYTES + 2 * largest
    assert all(one["peak"] <= 2 * largest for one in others)
