"""Models and tokenizers that cannot be used are refused before a weight is read, with what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aiohttp import web
from conftest import CPU
from helpers.samples import make_sample
from helpers.web_app import serving_route
from transformers import AutoTokenizer, Gemma3TextConfig, GPT2Config, MambaConfig, Qwen3Config

from rlgen.errors import DataError, RecipeError, RlgenError, SetupError
from rlgen.models.load import cached_model, check_model, load_model, load_tokenizer, locate, positions
from rlgen.models.tiny import build_tiny, byte_tokenizer
from rlgen.recipe import load_recipe
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.setup.data import open_data

Proof = Callable[[str], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of a model, to be spoilt."""
    return Path(shutil.copytree(build_tiny("qwen3"), tmp_path / "model"))


def check(folder: Path) -> str:
    """What is said of a model before its weights are read."""
    with pytest.raises(SetupError) as error:
        check_model(str(folder), None, load_tokenizer(locate(str(folder)), None))
    assert error.value.exit_code == 3 and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.fault(38)
def test_a_folder_that_is_no_model(model: Path, proof: Proof) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    said = check(model)
    assert "only pytorch_model.bin: that is a pickle" in said and "save_pretrained(NEW_FOLDER)` writes safetensors" in said
    with pytest.raises(SetupError, match="safetensors"):
        load_model(str(model), None, torch.float32, "sdpa", CPU)
    (model / "pytorch_model.bin").unlink()
    assert check(model).endswith("holds no weights in safetensors")
    (model / "config.json").unlink()
    assert "holds no config.json" in check(model)
    proof(said)


@pytest.mark.fault(38)
def test_files_that_do_not_fit_their_config_or_are_cut_off(model: Path, proof: Proof) -> None:
    def said_of(**changes: object) -> str:
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(SetupError) as error:
            load_model(str(model), None, torch.float32, "sdpa", CPU)
        return str(error.value)

    config = json.loads((model / "config.json").read_text())
    shapes = "model.embed_tokens.weight has the shape [260, 128] in its files, [300, 128] by its config.json"
    assert said_of(vocab_size=300) == f"model.path: {model}: {shapes}"
    assert "`num_hidden_layers` (5) must be equal to the number of `layer_types` (4)" in said_of(num_hidden_layers=5)
    os.truncate(model / "model.safetensors", 100_000)
    assert said_of().endswith("file not fully covered; a file of its weights is damaged or incomplete: fetch it again")
    proof(said_of())


@pytest.mark.fault(38)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_model_without_a_tokenizer(kind: str, tmp_path: Path, proof: Proof) -> None:
    """transformers makes one of the config: every prompt is then empty, or one unknown token."""
    shutil.copy(build_tiny(kind) / "config.json", tmp_path)
    said = check(tmp_path)
    assert f"model.path: {tmp_path} holds no tokenizer; copy the files of the one that its model was trained with" == said
    proof(said)


@pytest.mark.fault(39)
def test_a_model_that_needs_its_own_code(model: Path, tmp_path: Path, recipe_file: Path, proof: Proof) -> None:
    ran = tmp_path / "ran"
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass C: pass\nclass M: pass\n")
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "own_kind", "auto_map": own}))
    said = check(model)
    assert f"model.path: {model} needs Python code of its own repository, which rlgen never runs" in said and not ran.exists()
    with pytest.raises(RlgenError, match="rlgen runs no code of a model's repository"):
        load_recipe(recipe_file, ["model.trust_remote_code=true"])
    proof(said)


@pytest.mark.fault(40)
def test_a_tokenizer_with_more_ids_than_the_model(model: Path, proof: Proof) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    said = check(model)
    assert "has ids up to 260, but the model has only 260 embeddings" in said
    proof(said)


@pytest.mark.fault(12)
def test_rows_that_are_longer_than_the_model(model: Path, recipe_file: Path, proof: Proof) -> None:
    at = f"model.path={model}"
    open_data(load_recipe(recipe_file, [at, "rollout.max_completion_tokens=4032"]).recipe)  # and 64 are 4096
    with pytest.raises(RecipeError) as caught:
        open_data(load_recipe(recipe_file, [at, "rollout.max_completion_tokens=4033"]).recipe)
    said = str(caught.value)
    assert caught.value.exit_code == 2 and "data.max_prompt_tokens + rollout.max_completion_tokens = 4097" in said
    assert said.endswith(f"model.path {model} has 4096 positions; lower one of them: 4096 together at most")
    proof(said)


@pytest.mark.fault(25)
def test_a_model_of_the_cache_is_named_with_its_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """Whole runs without a network: tests/security/test_network.py."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "v2").write_text("c0ffee")
    shutil.copytree(model, cached / "snapshots" / "c0ffee")
    assert cached_model("org/tiny", "v2") is None, "the network may be asked"
    monkeypatch.setattr("rlgen.models.load.is_offline_mode", lambda: True)
    assert cached_model("org/tiny", "v2") == "offline: model.path org/tiny is taken from the cache, commit c0ffee"
    assert cached_model("org/tiny", None) == "offline: model.path org/tiny is taken from the cache"
    assert cached_model(str(model), None) is None
    proof(str(cached_model("org/tiny", "v2")))


def test_positions_of_a_model() -> None:
    assert positions(Qwen3Config(max_position_embeddings=100)) == 100
    stretched = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    assert positions(Qwen3Config(max_position_embeddings=100, rope_parameters=stretched)) == 400
    by_layer = {"full_attention": {**stretched, "rope_type": "linear"}, "sliding_attention": {"rope_type": "default"}}
    assert positions(Gemma3TextConfig(max_position_embeddings=100, rope_parameters=by_layer)) == 400
    assert positions(GPT2Config(n_positions=7)) == 7 and positions(MambaConfig()) is None


@pytest.mark.fault(23)
@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_padding_never_hides_the_end_of_a_completion(model: Path, pad: str | None, proof: Proof) -> None:
    """Masks follow from lengths: no pad id is looked at anywhere."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(model)
    loaded = load_tokenizer(str(model), None)
    end = loaded.eos_token_id
    assert loaded.pad_token_id == (end if pad else None)
    check_model(str(model), None, loaded)
    long = make_sample(completion_ids=(7, end, 8, 9, end), sampler_logp=(-0.5,) * 5, loss_mask=(True,) * 5)
    short = make_sample(completion_ids=(7, 8, end))
    batch = collate(Samples.of([long, short]), [0, 1], CPU)
    assert batch.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert batch.completion_ids[batch.mask].tolist() == [7, end, 8, 9, end, 7, 8, end]
    proof(f"pad {pad}: every end is trained on")


@pytest.mark.fault(23)
def test_a_chat_without_a_template_is_refused(model: Path, recipe_file: Path, proof: Proof) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    words = "has no chat template; take an instruction-tuned model, or use texts as prompts, with"
    with pytest.raises(DataError, match=words) as error:
        open_data(load_recipe(recipe_file, [f"model.path={model}"]).recipe)
    proof(str(error.value))


ASK = """
import json, sys, time
from rlgen.data.source import load_rows
from rlgen.errors import SetupError
from rlgen.models.load import load_config, load_tokenizer
from rlgen.recipe.models import DataRecipe
for status in sys.argv[1:]:
    name = f"org/s{status}"
    data = DataRecipe(source=name)
    for ask in (lambda: load_tokenizer(name, "v2"), lambda: load_config(name, None), lambda: load_rows(data, 0)):
        began = time.monotonic()
        try:
            ask()
        except SetupError as error:
            print(json.dumps([int(status), str(error), time.monotonic() - began]))
"""


@pytest.mark.slow
@pytest.mark.fault(25, 38)
@pytest.mark.parametrize("statuses", [(404, 401, 403), pytest.param((429, 503), marks=pytest.mark.slow)])
def test_a_hub_that_refuses(tmp_path: Path, statuses: tuple[int, ...], proof: Proof) -> None:
    asked: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        """With the status that the repository's name has: org/s404."""
        asked.append(request.path)
        found = re.search(r"org/s(\d{3})", request.path)
        return web.Response(status=int(found[1]) if found else 404, headers={"Retry-After": "1"})

    with serving_route("*", "/{path:.*}", refuse) as port:
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_" + "a" * 20}
        command = [sys.executable, "-c", ASK, *map(str, statuses)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **where})
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [status for status, _, _ in told] == [status for status in statuses for _ in range(3)], done.stderr
    asked_for = ["the tokenizer of org/s{} (revision v2)", "the config of org/s{}", "org/s{}"]
    for (status, said, seconds), what in zip(told, asked_for * len(statuses), strict=True):
        assert f"the hub did not provide {what.format(status)}" in said and seconds < 100 and "hf auth login" in said
        assert "\n" not in said and "hf_a" not in said
        assert what == "org/s{}" or str(status) in said.replace(f"org/s{status}", "")
    assert 0 < len(asked) <= 40 * len(statuses)
    proof(f"HTTP {statuses}: {len(asked)} requests, {max(seconds for _, _, seconds in told):.1f} s at most")
