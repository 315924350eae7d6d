"""The longest completions that fit into one GPU, by model, GPU and what is trained: the table of page `settings`.

    python scripts/settings.py
    python scripts/settings.py 0.6B 8B         # some of the models

Each cell is `rlgen estimate` of one recipe, with longer and longer completions; no GPU and no weights are needed. The shapes are
those of Qwen3 as published; a model of the same size and another family needs about as much.
"""

import json
import sys
import tempfile
from bisect import bisect_left
from pathlib import Path

from rlgen.cli.estimate import GIB, memory_report
from rlgen.models.gpus import USABLE
from rlgen.recipe import load_recipe

# hidden size, size of the MLP, layers, heads, whether head and embedding are one tensor
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
GPUS = (24, 48, 80, 141)  # GB as sold
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
RECIPE = """\
run: {name: fits, steps: 1}
model: {path: MODEL, dtype: bfloat16, gradient_checkpointing: true}
data: {source: "task:word_problems", chat: true, max_prompt_tokens: 512}
rewards: [{use: numeric_match}]
rollout: {prompts_per_step: 32, group_size: 8}
engine: {kind: colocated, gpu_memory_utilization: 0.4, sleep: true}
trainer: {kind: grpo}
optim: {learning_rate: 1.0e-6}
"""
TRAINED = {"all weights": [], "LoRA, rank 32": ["model.lora={rank: 32}"]}


def config_of(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> dict[str, object]:
    """The config.json of a Qwen3 model."""
    shape = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied, **shape}


def longest(recipe: Path, overrides: list[str], gpu: int) -> str:
    """The most tokens of a completion with which the recipe fits into a GPU of `gpu` GB; `–` if it never does."""

    def too_long(length: int) -> bool:
        budget = max(8192, 512 + length)  # a row must fit into a micro-batch
        said = [f"rollout.max_completion_tokens={length}", f"optim.micro_batch_tokens={budget}"]
        return not memory_report(load_recipe(recipe, [*overrides, *said]).recipe, int(gpu * USABLE * GIB))["fits"]

    fitting = bisect_left(LENGTHS, True, key=too_long)
    return f"{LENGTHS[fitting - 1]:,}" if fitting else "–"


def main() -> None:
    print(f"{'model':<8}{'trained':<16}" + "".join(f"{gpu:>5} GB" for gpu in GPUS))
    for name in sys.argv[1:] or SHAPES:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            model, recipe = Path(folder) / "model", Path(folder) / "recipe.yaml"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config_of(*shape)))
            recipe.write_text(RECIPE.replace("MODEL", str(model)))
            for trained, overrides in TRAINED.items():
                cells = [longest(recipe, overrides, gpu) for gpu in GPUS]
                print(f"{name:<8}{trained:<16}" + "".join(f"{cell:>8}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
