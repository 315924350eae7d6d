"""Mistakes that newcomers make, and what the answer to each must contain: the remedy.

A mistake is a change to a recipe that is right, and perhaps to a file beside it. `change` is a line of the recipe: it takes the
place of the line of its section, or is added; "-data" takes the line out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Command = Literal["validate", "look", "train", "rewards test"]  # look: validate that opens model and data

RECIPE = """\
run: {steps: 2, dir: RUNS}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: train.jsonl, columns: {prompt: question, answer: answer}, chat: true}
rewards: [{use: "rewards.py:correct"}]
rollout: {prompts_per_step: 2, group_size: 2, max_completion_tokens: 8}
engine: {kind: transformers}
"""

REWARDS = """\
def correct(completion, answer):
    return float(answer in completion)

def always_none(completion):
    return None

def of_trl(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]

def of_trl_chats(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

def needs_more(completion, solution):
    return 1.0
"""

ROWS = [{"question": f"{number} + {number}?", "answer": str(2 * number)} for number in range(20)]


def lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "train.jsonl": lines(ROWS),
    "rewards.py": REWARDS,
    "long.jsonl": lines([*ROWS[:13], *({"question": "long " * 20, "answer": "1"} for _ in range(7))]),
    "chats.jsonl": lines([{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS]),
    "answered.jsonl": lines(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": row["answer"]}]} for row in ROWS]
    ),
    "parts.jsonl": lines([{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]} for _ in ROWS]),
    "from.jsonl": lines([{"prompt": [{"from": "human", "value": "a"}]} for _ in ROWS]),
    "empty.jsonl": "",
    "broken.jsonl": '{"question": "a", "answer": "b"}\n{"question": \n',
    "few.jsonl": lines(ROWS[:3]),
    "holes.jsonl": lines([{**row, "answer": "" if number % 2 else row["answer"]} for number, row in enumerate(ROWS)]),
    "wrong.py": "import no_such_package\n\ndef f(completion):\n    return 1.0\n",
    "counter.py": "calls = []\n\ndef f(completion, answer):\n    calls.append(1)\n    return float(len(calls))\n",
    "nothing.py": "def f(completion, answer):\n    score = float(answer in completion)\n",
    "verl.py": "def f(solution_str, answer):\n    return 1.0\n",
    "text.py": "def f(completion, answer):\n    return '1.0'\n",
    "one.py": "def f(completions, answer):\n    return 1.0\n",
    "share.jsonl": lines([{"conversations": [{"from": "human", "value": "a"}], "answer": "b"}] * 20),
    "typo.py": "def f(completion:\n    return 1.0\n",
}


@dataclass(frozen=True)
class Mistake:
    change: str | tuple[str, ...]
    remedy: str | tuple[str, ...]  # texts that the answer must contain
    command: Command = "validate"
    code: int = 2  # exit code; 0: a warning
    files: Mapping[str, str] = field(default_factory=dict)


def data(source: str, more: str = "columns: {prompt: question, answer: answer}, chat: true") -> str:
    return f"data: {{source: {source}, {more}}}"


def chats(source: str) -> str:
    return f"data: {{source: {source}}}"


ADD = '''\
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: other.
    """
    return a + b
'''
ANY = {"rewards.py": "def correct(completion):\n    return 1.0\n"}  # a reward that needs no column
REWARD = 'rewards: [{use: "rewards.py:%s"}]'

MISTAKES: dict[str, Mistake] = {
    # A plain value where a mapping is expected.
    "trainer by name": Mistake("trainer: ppo", ("write `trainer: {kind: grpo}`", "no value model")),
    "trainer by its loss": Mistake("trainer: dapo", "write `trainer: {kind: grpo, loss: dapo}`"),
    "engine by name": Mistake("engine: vllm", ("write `engine: {kind: colocated}`", "server is vLLM in others")),
    "model by path": Mistake("model: Qwen/Qwen3-0.6B", "write `model: {path: Qwen/Qwen3-0.6B}`"),
    "data by file": Mistake("data: train.jsonl", "write `data: {source: train.jsonl}`"),
    "reward by name": Mistake("rewards: exact_match", "write `rewards: [{use: exact_match}]`"),
    "rewards as a list of names": Mistake("rewards: [exact_match]", "write `{use: exact_match}`"),
    "rewards as a mapping": Mistake("rewards: {use: exact_match, weight: 2}", "write `rewards: [{use: exact_match, weight: 2}]`"),
    "lora switched on": Mistake('model: {path: "tiny:qwen3", lora: true}', "write `lora: {}` for its defaults"),
    "lora by rank": Mistake('model: {path: "tiny:qwen3", lora: 16}', "write `lora: {rank: 16}`"),
    "columns by name": Mistake("data: {source: train.jsonl, columns: question}", "write `columns: {prompt: question}`"),
    "checkpoint by steps": Mistake("checkpoint: 50", "write `checkpoint: {every: 50}`"),
    "optimizer by name": Mistake("optim: adamw_torch", ("write `optim: {learning_rate: 1.0e-6}`", "is AdamW")),
    "processes by number": Mistake("processes: 4", "write `processes: {count: 4}`"),
    # A key in the wrong place, of another tool, or misspelled.
    "group size in trainer": Mistake("trainer: {group_size: 4}", "here it is `rollout.group_size`"),
    "lora at the top": Mistake("lora: {rank: 8}", "here it is `model.lora`"),
    "batch size of a device": Mistake("optim: {per_device_train_batch_size: 8}", "rollout.prompts_per_step"),
    "accumulation": Mistake("optim: {gradient_accumulation_steps: 4}", "micro_batch_tokens"),
    "repetition penalty": Mistake("rollout: {repetition_penalty: 1.1}", "rlgen docs sampling"),
    "nucleus and reference": Mistake(("rollout: {top_p: 0.9}", "trainer: {kind: grpo, beta: 0.01}"), "or set trainer.beta to 0"),
    "top-k and another dtype": Mistake(
        ("rollout: {top_k: 50}", "engine: {kind: colocated, dtype: bfloat16}"),
        "needs an engine with the trainer's dtype and weights",
    ),
    "min-p and a regular expression": Mistake(
        (
            "rollout: {min_p: 0.1}",
            "trainer: {kind: grpo, correction: {mode: none}}",
            'engine: {kind: colocated, structured_regex: "[0-9]+"}',
        ),
        "does not go with engine.structured_regex",
    ),
    "stop strings and tools": Mistake(
        ('rollout: {stop: ["x"]}', "tools: [{use: math:floor}]"),
        "rollout.stop does not go with tools: the chat template says what ends",
    ),
    "stop words": Mistake('rollout: {stop_words: ["x"]}', "did you mean `stop`?"),
    "resume as a key": Mistake("run: {resume: true}", "`rlgen train RECIPE --resume`"),
    "key of another kind": Mistake("trainer: {kind: rloo, cispo_max: 3.0}", "it is a key of kind grpo"),
    "letters swapped": Mistake("trainer: {clip_hgih: 0.28}", "did you mean `clip_high`?"),
    "section misspelled": Mistake("rolout: {group_size: 4}", "did you mean `rollout`?"),
    "misspelled and in the wrong place": Mistake("lerning_rate: 1.0e-5", "did you mean `optim.learning_rate`?"),
    "wandb": Mistake("wandb: {project: mine}", "write `sinks: [{kind: wandb}]`"),
    "batch_size": Mistake("batch_size: 32", "set rollout.prompts_per_step and rollout.group_size"),
    "axolotl's rl": Mistake("rl: grpo", "write `trainer: {kind: grpo}`"),
    "a section of TRL": Mistake("trl: {beta: 0.1}", "`rlgen docs coming-from-trl`"),
    "optimizer": Mistake("optimizer: adamw", ("write `optim: {learning_rate: 1.0e-6}`", "is AdamW")),
    "adapter": Mistake("adapter: lora", "lora: {rank: 32}"),
    "adapter of a model": Mistake('model: {path: "tiny:qwen3", adapter: lora}', "write `lora: {rank: 32}`"),
    "async_grpo": Mistake("async_grpo: true", "write `rollout: {async_steps: 1}`"),
    "rollout_func": Mistake("rollout_func: a.py:f", 'write `rollout: {use: "mine.py:function"}`'),
    "reward_processing_classes": Mistake("reward_processing_classes: x", "`rewards: [{use: reward_model"),
    "a secret in a recipe": Mistake("sinks: [{kind: wandb, api_key: abc}]", "set WANDB_API_KEY in the environment"),
    "a loss of another trainer": Mistake("trainer: {kind: grpo, loss: sigmoid}", "`trainer: {kind: online_dpo}`"),
    # What is no YAML.
    "a merge key": Mistake("run: {<<: {seed: 1}, steps: 2}", "write `extends: FILE`"),
    "tabs": Mistake("run:\n\tsteps: 2", "indent with spaces, not with tabs"),
    "indented otherwise": Mistake("run:\n  seed: 1\n steps: 2", "`steps: 2` is indented differently"),
    "no space after a colon": Mistake("run:\n  seed:1\n  steps: 2", "a space after the key in `seed:1`"),
    "no colon": Mistake("rewards:\n- use: exact_match\n  weight 0.5", "a colon and a space after the key in `weight 0.5`"),
    "a colon in a value": Mistake("data:\n  source: train.jsonl\n  system: Answer: yes", "put quotes around a value"),
    "a colon in braces": Mistake("run: {name: a: b, steps: 2}", "put quotes around a value"),
    # Values that are hardly meant.
    "a folder as a run's name": Mistake("run: {name: a/b, steps: 2}", "run.dir is the folder that holds runs"),
    "no reward": Mistake("rewards: []", "such as `rewards: [{use: exact_match}]`"),
    "no folder of a model": Mistake("model: {path: ./nomodel}", "a model of the hub is written as owner/name"),
    "a huge group": Mistake("rollout: {group_size: 100000}", "4 to 64 a prompt are usual", code=0),
    "a huge micro-batch": Mistake("optim: {micro_batch_tokens: 100000000}", "`rlgen estimate` says what fits", code=0),
    "the question as answer": Mistake(
        data("train.jsonl", "columns: {prompt: question, answer: question}, chat: true"), "are both `question`", code=0
    ),
    # Something is missing.
    "no model": Mistake("-model", "such as `model: {path: Qwen/Qwen3-0.6B}`"),
    "no data": Mistake("-data", "such as `data: {source: train.jsonl, columns: {prompt: question, answer: answer}}`"),
    "no rewards": Mistake("-rewards", "such as `rewards: [{use: exact_match}]`"),
    "no path": Mistake("model: {dtype: float32}", "`model.path` is missing; such as `path: Qwen/Qwen3-0.6B`"),
    "no source": Mistake("data: {chat: true}", "`data.source` is missing; such as `source: train.jsonl`"),
    "reward without use": Mistake("rewards: [{weight: 1.0}]", "`rewards.0.use` is missing; such as `use: exact_match`"),
    # A value that is none.
    "vllm as kind": Mistake("engine: {kind: vllm}", "colocated is vLLM in this process"),
    "ppo as kind": Mistake("trainer: {kind: ppo}", "rlgen trains no value model"),
    "gspo as kind": Mistake("trainer: {kind: gspo}", "write `trainer: {kind: grpo, loss: gspo}`"),
    "fp16 as dtype": Mistake('model: {path: "tiny:qwen3", dtype: fp16}', "set bfloat16"),
    "quoted number": Mistake('run: {steps: "100"}', "write 100, without quotes"),
    "thousands": Mistake("run: {steps: 1_000}", "write 1000"),
    "float for a count": Mistake("run: {steps: 1e3}", "write 1000"),
    "yes": Mistake("data: {source: train.jsonl, chat: yes}", "write true"),
    "empty value": Mistake("optim: {learning_rate: }", "a key without a value is null: give it one, or remove it"),
    "None": Mistake("checkpoint: {keep: None}", "leave it out, or write null"),
    "a warm-up as a share": Mistake("optim: {warmup_steps: 0.1}", "must be a whole number"),
    "a learning rate of 5": Mistake("optim: {learning_rate: 5}", ("warning: optim.learning_rate 5", "1e-6"), code=0),
    "one completion": Mistake("rollout: {group_size: 1}", "set rollout.group_size to 2 or more"),
    "greedy": Mistake("rollout: {temperature: 0}", "set rollout.temperature to 0.01 or more"),
    "server without an address": Mistake("engine: {kind: server}", "set engine.url to what `rlgen serve` printed"),
    "a folder of 300 characters": Mistake(f"run: {{dir: {'x' * 300}}}", "at most 255 characters"),
    "one below a folder that is not there": Mistake(f"run: {{dir: new/{'x' * 300}}}", "at most 255 characters"),
    "a name of 300 characters": Mistake(f"run: {{name: {'x' * 300}}}", "must have at most 200 characters"),
    "an unknown reward": Mistake("rewards: [{use: exactmatch}]", "did you mean `exact_match`?"),
    "a reward file alone": Mistake("rewards: [{use: rewards.py}]", "rewards.py:my_reward"),
    "a reward with a dot": Mistake("rewards: [{use: rewards.correct}]", "did you mean `rewards:correct`?"),
    # Files.
    "no such file": Mistake(data("trian.jsonl"), "train.jsonl`?"),
    "no such folder": Mistake("model: {path: ./modles}", ("there is no folder", "did you mean"), files={"models/x": ""}),
    "a path in two folders": Mistake("model: {path: a/b/modles}", "there is no folder"),
    "prompt column misspelled": Mistake(
        data("train.jsonl", "columns: {prompt: qestion, answer: answer}"), ("did you mean `question`?", "data.columns.prompt")
    ),
    "answer column of another name": Mistake(
        data("train.jsonl", "columns: {prompt: question, answer: solution}"),
        ("has no column `solution`", "it has answer, question; set data.columns.answer to one of them"),
    ),
    "default column": Mistake("data: {source: train.jsonl}", "it has answer, question; set data.columns.prompt to one of them"),
    "function misspelled": Mistake(REWARD % "corect", "did you mean `correct`?"),
    "no reward file": Mistake('rewards: [{use: "reward.py:correct"}]', "rewards.py`?"),
    "a reward that needs a column": Mistake(REWARD % "needs_more", "`solution`, which is no column of the data"),
    "a reward that cannot be imported": Mistake(
        'rewards: [{use: "wrong.py:f"}]', ("No module named 'no_such_package'", "wrong.py:1")
    ),
    "a reward that is no Python": Mistake('rewards: [{use: "typo.py:f"}]', ("typo.py", "line 1")),
    "a reward package that is not there": Mistake('rewards: [{use: "no_package.rewards:f"}]', "No module named 'no_package'"),
    # What model and data show.
    "prompts too long": Mistake(
        data("long.jsonl", "columns: {prompt: question, answer: answer}, chat: true, max_prompt_tokens: 64"),
        ("warning: 7 of 20 rows are left out", "have 119 tokens, and data.max_prompt_tokens is 64"),
        "look",
        0,
    ),
    "all prompts too long": Mistake(
        data("long.jsonl", "columns: {prompt: question, answer: answer}, chat: true, max_prompt_tokens: 4"),
        ("no row is left", "25 to 119 tokens, and data.max_prompt_tokens is 4: raise that"),
        "look",
        4,
    ),
    "texts for a chat model": Mistake(
        data("train.jsonl", "columns: {prompt: question, answer: answer}"),
        ("warning: model.path has a chat template, but prompts are texts", "set data.chat to true, or to false to keep this"),
        "look",
        0,
    ),
    "conversations with their answer": Mistake(
        "data: {source: answered.jsonl, columns: {prompt: messages}}",
        ("the last message is the assistant's", "remove that message"),
        "look",
        4,
        ANY,
    ),
    "content in parts": Mistake(chats("parts.jsonl"), "write the text itself", "look", 4, ANY),
    "from and value": Mistake(
        chats("from.jsonl"), "a message must have one of the roles system, user, assistant", "look", 4, ANY
    ),
    "no rows": Mistake(data("empty.jsonl"), "holds no row", "look", 4),
    "a broken line": Mistake(data("broken.jsonl"), "broken.jsonl:2: the line is not JSON", "look", 4),
    "half of the answers missing": Mistake(data("holes.jsonl"), "name another column, or complete the data", "look", 4),
    "more prompts a step than rows": Mistake(
        (data("few.jsonl"), "rollout: {prompts_per_step: 8, group_size: 2}"), "set it to 3 or less", "look", 4
    ),
    "an unknown tiny model": Mistake('model: {path: "tiny:qwen9"}', "tiny", "look", 3),
    "tools that the template does not show": Mistake(
        ('tools: [{use: "tools.py:add"}]', data("train.jsonl", "columns: {prompt: question}, chat: true, tool_format: hermes")),
        "set data.chat_template to a file with a template that does",
        "look",
        3,
        {"tools.py": ADD, **ANY},
    ),
    "more completion than the model has positions": Mistake(
        "rollout: {max_completion_tokens: 5000}", "has 4096 positions; set it to 4095 or less", "look"
    ),
    # Rewards.
    "a reward that is always None": Mistake(REWARD % "always_none", "returns None for each answer", "rewards test", 0),
    "completions as TRL has them in chats": Mistake(
        REWARD % "of_trl_chats", "a completion is a text here, not a list of messages", "rewards test", 5
    ),
    "a reward that changes": Mistake('rewards: [{use: "counter.py:f"}]', "a resumed run will not be exact", "rewards test", 0),
    "a reward that returns nothing": Mistake('rewards: [{use: "nothing.py:f"}]', "end it with `return` and the reward"),
    # Other data.
    "an evaluation without the prompt's column": Mistake(
        "eval: {source: chats.jsonl, every: 1}", "set eval.columns.prompt to one of them"
    ),
    "rows of ShareGPT": Mistake("data: {source: share.jsonl}", "rows of ShareGPT hold the answers too"),
    # Keys of verl, OpenRLHF, axolotl, Unsloth, vLLM and data sets, and where they live here.
    "verl's tree": Mistake("actor_rollout_ref: {rollout: {n: 8}}", "the sections model, rollout, engine, trainer and optim"),
    "verl's mini-batch": Mistake("trainer: {ppo_mini_batch_size: 64}", "trainer.updates_per_rollout says how many follow"),
    "verl's micro-batch": Mistake("trainer: {ppo_micro_batch_size_per_gpu: 4}", "follow from optim.micro_batch_tokens"),
    "verl's steps": Mistake("total_training_steps: 100", "renamed to `run.steps`"),
    "verl's project": Mistake("project_name: mine", "write `sinks: [{kind: wandb, project: mine}]`"),
    "verl's experiment": Mistake("experiment_name: mine", "renamed to `run.name`"),
    "verl's evaluation": Mistake("val_files: test.parquet", "write `eval: {source: heldout.jsonl}`"),
    "verl's KL": Mistake("trainer: {use_kl_loss: true}", "set trainer.beta above 0"),
    "verl's clipping of gradients": Mistake("optim: {grad_clip: 1.0}", "renamed to `optim.max_grad_norm`"),
    "verl's reward": Mistake("custom_reward_function: {path: a.py, name: f}", 'write `rewards: [{use: "rewards.py:function"}]`'),
    "verl's signature": Mistake('rewards: [{use: "verl.py:f"}]', "did you mean `completion`?"),
    "machines": Mistake("nnodes: 2", "`torchrun --nnodes N"),
    "batched tokens": Mistake("engine: {kind: colocated, max_num_batched_tokens: 8192}", "rlgen sets it itself: remove it"),
    "an argument of vLLM": Mistake("engine: {kind: colocated, enable_prefix_caching: true}", "goes into engine.extra"),
    "a seed for vLLM": Mistake("engine: {kind: colocated, extra: {seed: 3}}", "engine.extra.seed is set by rlgen"),
    "a stage of ZeRO": Mistake("zero_stage: 3", "processes.strategy is ddp or fsdp"),
    "OpenRLHF's engines": Mistake("vllm_num_engines: 2", "renamed to `engine.servers`"),
    "OpenRLHF's episodes": Mistake("num_episodes: 3", "epochs × rows / rollout.prompts_per_step"),
    "OpenRLHF's reward server": Mistake("remote_rm_url: x", "`rewards: [{use: judge"),
    "OpenRLHF's template": Mistake("apply_chat_template: true", "renamed to `data.chat`"),
    "a length of sequences": Mistake("sequence_len: 2048", "data.max_prompt_tokens and rollout.max_completion_tokens"),
    "axolotl's packing": Mistake("sample_packing: true", "renamed to `optim.packing`"),
    "axolotl's held-out share": Mistake("val_set_size: 0.1", "write `eval: {source: heldout.jsonl}`"),
    "axolotl's attention": Mistake("flash_attention: true", "renamed to `model.attention`"),
    "axolotl's saves": Mistake("saves_per_epoch: 1", "in steps: `checkpoint.every`"),
    "Unsloth's rank": Mistake("max_lora_rank: 32", "renamed to `model.lora.rank`"),
    "Unsloth's inference": Mistake("fast_inference: true", "renamed to `engine.kind`"),
    "a penalty of vLLM": Mistake("rollout: {presence_penalty: 0.5}", "rlgen docs sampling"),
    "log-probs of vLLM": Mistake("rollout: {logprobs: 1}", "is recorded always"),
    "a name of a subset": Mistake("data: {source: openai/gsm8k, name: main}", "did you mean `subset`?"),
    "a path of data": Mistake("data: {path: train.jsonl}", "did you mean `source`?"),
    "a number of rows": Mistake("data: {source: train.jsonl, max_samples: 9}", "did you mean `limit`?"),
    "a column of prompts": Mistake("data: {source: train.jsonl, prompt_column: question}", "write `columns: {prompt: NAME}`"),
    "streaming": Mistake("data: {source: train.jsonl, streaming: true}", "the whole data set is read"),
    "thinking": Mistake("data: {source: train.jsonl, enable_thinking: false}", "template_args: {enable_thinking: false}"),
    "early stopping": Mistake("early_stopping: true", "a health rule with action stop"),
    "a number of GPUs": Mistake("gpus: 2", "torchrun --nproc-per-node N -m rlgen train RECIPE"),
    "a device": Mistake('model: {path: "tiny:qwen3", device_map: auto}', "a GPU is used where there is one"),
    "a reference model": Mistake("ref_model: a/b", "the reference is the model at the start"),
    "a penalty for length": Mistake("trainer: {length_penalty: 0.1}", "write `rewards: [{use: overlong}]`"),
    "betas": Mistake("optim: {betas: [0.9, 0.95]}", "AdamW has torch's betas and epsilon"),
    "a name of an optimizer": Mistake("optim: {name: adamw_torch}", "did you mean `kind`?"),
    "muon": Mistake("optim: {kind: muon}", "is not one of adamw, adamw_8bit"),
    "a schedule with a warm-up": Mistake("optim: {schedule: constant_with_warmup}", "write constant"),
    "a schedule of others": Mistake("optim: {schedule: cosine_with_min_lr}", "did you mean `cosine`?"),
    "reinforce++": Mistake("trainer: {kind: reinforce++}", "rloo is the nearest"),
    "capitals": Mistake("trainer: {kind: GRPO}", "did you mean `grpo`?"),
    "a loss in capitals": Mistake("trainer: {loss: GRPO}", "did you mean `grpo`?"),
    "scaling switched on": Mistake("trainer: {scale_rewards: true}", "did you mean `group`?"),
    "tensor parallelism": Mistake("processes: {strategy: fsdp, tp_size: 2}", "did you mean `tensor`?"),
    "context parallelism": Mistake("processes: {strategy: fsdp, cp_size: 2}", "did you mean `context`?"),
    "layers without shards": Mistake("processes: {tensor: 2}", "has no effect with processes.strategy ddp"),
    "zero3": Mistake("processes: {strategy: zero3}", "did you mean `fsdp`?"),
    "half": Mistake('model: {path: "tiny:qwen3", dtype: half}', "set bfloat16"),
    "qlora": Mistake('model: {path: "tiny:qwen3", qlora: true}', "write `lora: {}` and `quantization: nf4`"),
    "a bias of an adapter": Mistake('model: {path: "tiny:qwen3", lora: {bias: none}}', "remove it: an adapter has no bias"),
    "no adapter": Mistake('model: {path: "tiny:qwen3", lora: none}', "leave it out"),
    # Wrong units and types.
    "a percentage": Mistake("engine: {kind: colocated, gpu_memory_utilization: 90}", "it is a share: write 0.9"),
    "a percent sign": Mistake("trainer: {clip_high: 28%}", "write 0.28, without a unit"),
    "thousands by k": Mistake("run: {steps: 1k}", "write 1000, without a unit"),
    "seconds with a unit": Mistake('rewards: [{use: "rewards.py:correct", timeout: 30s}]', "write 30, without a unit"),
    "memory with a unit": Mistake("engine: {kind: colocated, kv_cache_gib: 4GB}", "write 4, without a unit"),
    "a decimal comma": Mistake("optim: {learning_rate: '1,5e-6'}", "write 1.5e-06, without quotes"),
    "top-k of vLLM": Mistake("rollout: {top_k: -1}", "0 samples from all tokens"),
    "never saved": Mistake("checkpoint: {every: 0}", "above run.steps only the last step is saved"),
    "all checkpoints": Mistake("checkpoint: {keep: all}", "a large number keeps all"),
    "no clipping of gradients": Mistake("optim: {max_grad_norm: 0}", "a large number, such as 1.0e6, clips nothing"),
    "hours without a unit": Mistake("run: {must_save_by: 4}", "write a duration such as 3h50m"),
    "never evaluated": Mistake("eval: {source: chats.jsonl, every: 0}", "remove the section `eval`"),
    "a share of the rows": Mistake("eval: {split: 0.1}", "must be cut off into a file, for eval.source"),
    "evaluation switched on": Mistake("eval: true", "write `eval: {source: heldout.jsonl, every: 20}`"),
    "no sentinel": Mistake("sentinel: false", "write `sentinel: {on_drift: warn}`"),
    "no checkpoints": Mistake("checkpoint: false", "with N above run.steps"),
    "a rule by number": Mistake("health: {entropy: 0.1}", "write `entropy: {threshold: 0.1}`"),
    "a rule's action for all": Mistake("health: {action: ignore}", "such as `entropy: {action: ignore}`"),
    "a cap by number": Mistake("trainer: {correction: 3.0}", "write `correction: {max: 3.0}`"),
    "a list for a section": Mistake("trainer:\n- kind: grpo\n- beta: 0.1", "write keys and values, without `-`"),
    "several files": Mistake("data: {source: [train.jsonl, few.jsonl]}", "a glob, such as 'data/*.jsonl'"),
    "rewards by weight": Mistake("rewards: {exact_match: 1.0}", "write `rewards: [{use: exact_match, weight: 1.0}]`"),
    "a reward as a key": Mistake("rewards: [{exact_match: 1.0}]", "write `{use: exact_match}`"),
    "a path of a reward": Mistake('rewards: [{path: "rewards.py:correct"}]', "did you mean `use`?"),
    "trackers as a mapping": Mistake("sinks: {wandb: {project: mine}}", "write `sinks: [{kind: wandb, project: mine}]`"),
    "no tracker": Mistake("sinks: none", "leave it out"),
    "a folder of curves": Mistake("sinks: [{kind: tensorboard, log_dir: x}]", "did you mean `folder`?"),
    "a tool by name": Mistake("tools: [calculator]", "write `{use: calculator}`"),
    "calls of a tool": Mistake('tools: [{use: "tools.py:add", max_calls: 3}]', "rollout.max_turns", files={"tools.py": ADD}),
    "an environment by name": Mistake("environment: grid", "write `environment: {use: grid}`"),
    "an environment of others": Mistake("environment: {use: CartPole-v1}", "built-in environments are guess_number"),
    "both answer": Mistake(
        ("environment: {use: grid}", 'tools: [{use: "tools.py:add"}]', "rewards: [{use: environment}]"),
        "remove one of them",
        files={"tools.py": ADD},
    ),
    "columns by their names": Mistake("data: {source: train.jsonl, columns: {question: prompt}}", "such as `prompt: question`"),
    "a label": Mistake("data: {source: train.jsonl, columns: {prompt: question, label: answer}}", "did you mean `answer`?"),
    "no value of a section": Mistake("rewards:", "give it a value, such as `rewards: [{use: exact_match}]`"),
    # More that is no YAML, and more names.
    "twice": Mistake("run: {steps: 2, steps: 3}", "appears twice, first in line 6; remove one"),
    "an open bracket": Mistake("rewards: [{use: exact_match}", "close the bracket that line 6 opens"),
    "an open quote": Mistake('model: {path: "tiny:qwen3}', "close the quote that line 6 opens"),
    "a special sign": Mistake("model: {path: @mine}", "put quotes around a value that begins with `@`"),
    "an alias": Mistake("rewards:\n  *exact_match", "put quotes around a value that begins with `*`"),
    "a backslash": Mistake('run: {dir: "C:\\data"}', "single quotes around a value with a backslash"),
    "a variable in braces": Mistake("run: {name: x, steps: ${steps}}", "a recipe knows no variables"),
    "a variable of the shell": Mistake("run: {dir: $HOME/runs}", "give it to --set, where the shell fills it in"),
    "another comment": Mistake("run: {steps: 2} // two steps", "a comment begins with `#`"),
    "two documents": Mistake("# more\n---\nrun: {steps: 1}", "remove the line `---`"),
    "an equals sign": Mistake("run:\n  steps=2", "write `run: {steps: 2}`"),
    "a dotted key": Mistake("run.steps: 5", ("write `run: {steps: ...}`", "dotted keys are for --set")),
    "hydra's defaults": Mistake("defaults: [base]", "write `extends: FILE` at the top"),
    "a parent that is not there": Mistake("extends: base.yaml", ("does not exist", "starts at the folder of the file")),
    "typographic quotes": Mistake("model: {path: “tiny:qwen3”}", "a name of the hub is owner/name"),
    "an address of data": Mistake(data('"https://huggingface.co/datasets/openai/gsm8k"'), "such as openai/gsm8k"),
    "a file of weights": Mistake("model: {path: ./model.gguf}", "is a file; name a folder", files={"model.gguf": "x"}),
    "a task without its prefix": Mistake("data: {source: arithmetic}", "the task is task:arithmetic", code=0),
    "a run's name with a space": Mistake("run: {name: my run}", "letters, digits, `.`, `_` and `-`"),
    "a reward's name with a slash": Mistake('rewards: [{use: "rewards.py:correct", name: a/b}]', "must be letters, digits"),
    "two colons": Mistake('rewards: [{use: "rewards.py::correct"}]', "did you mean `rewards.py:correct`?"),
    "a call": Mistake('rewards: [{use: "rewards.py:correct()"}]', "did you mean `rewards.py:correct`?"),
    "a reward of the hub": Mistake("rewards: [{use: a/b-c}]", "a model {use: reward_model, args: {path: a/b-c}}"),
    "a broken expression": Mistake('rewards: [{use: regex_match, args: {pattern: "("}}]', "must be a regular expression"),
    "a judge without address": Mistake("rewards: [{use: judge, args: {model: m}}]", "such as `url: http://127.0.0.1:8000/v1`"),
    "a judge's whole address": Mistake(
        "rewards: [{use: judge, args: {url: 'http://a/v1/chat/completions', model: m}}]", "the address alone, http://a/v1"
    ),
    "a judge's key": Mistake("rewards: [{use: judge, args: {url: 'http://a/v1', model: m, api_key: x}}]", "`key_env` names"),
    "a device of a reward model": Mistake(
        "rewards: [{use: reward_model, args: {path: a/b, device: gpu}}]", "cpu, cuda or cuda:N"
    ),
    "a template by name": Mistake(data("train.jsonl", "chat: true, chat_template: chatml, columns: {prompt: question}"), "Jinja"),
    "semicolons": Mistake(
        "data: {source: n.csv}", "separate the columns with commas", files={"n.csv": "prompt;answer\na;b\n", **ANY}
    ),
    "columns between tabs": Mistake(
        "data: {source: t.csv}", "commas, not with tabs", files={"t.csv": "prompt\tanswer\na\tb\n", **ANY}
    ),
    # Servers.
    "an address without http": Mistake("engine: {kind: server, url: 'localhost:8000'}", "write it like http://127.0.0.1:8000"),
    "addresses in one text": Mistake("engine: {kind: server, url: 'http://a:1,http://b:2'}", "several are a list"),
    "a server's key": Mistake("engine: {kind: server, url: 'http://a:1', api_key: x}", "engine.token_env names"),
    "another name of an address": Mistake("engine: {kind: server, base_url: 'http://a:1/v1'}", "url: http://127.0.0.1:8000"),
    "a device of a server": Mistake("engine: {kind: server, launch: true, devices: 'cuda:1'}", 'such as "1" or [4, 5]'),
    "a port that is none": Mistake("engine: {kind: server, launch: true, port: 80000}", "less than or equal to 65535"),
    # Rows and rewards that are opened.
    "an array in JSON lines": Mistake(
        data("array.jsonl"), "an array of rows is a file that ends in .json", "look", 4, {"array.jsonl": json.dumps(ROWS)}
    ),
    "a model's folder without a config": Mistake("model: {path: ./m}", "holds no config.json", "look", 3, {"m/README.md": "x"}),
    "layers of another model": Mistake(
        "model: {path: 'tiny:qwen3', lora: {targets: [q_proj, query_key_value]}}", "they are called q_proj, k_proj", "look", 3
    ),
    "a score as text": Mistake('rewards: [{use: "text.py:f"}]', "a reward is a finite number", "rewards test", 5),
    "one reward for a group": Mistake('rewards: [{use: "one.py:f"}]', "not a list of 4 rewards", "rewards test", 5),
    # A run.
    "no server there": Mistake('engine: {kind: server, url: "http://127.0.0.1:9"}', "`rlgen serve RECIPE`", "train", 6),
}
