"""Holds the answers to keys and values that a recipe does not take, but that other tools or earlier versions do."""

from typing import get_args

from rlgen.recipe.trainers import GRPORecipe


def by_word(answers: dict[str, str]) -> dict[str, str]:
    """Returns the answer to each word: {"renamed": "old older"} -> {"old": "renamed", "older": "renamed"}."""
    return {word: answer for answer, words in answers.items() for word in words.split()}


# Answer -> the keys of other tools or earlier versions, in a certain place, that get it. A list index is written `*`.
REFUSED = by_word(
    {
        "rlgen runs no code of a model's repository; take a model whose architecture transformers has": "model.trust_remote_code",
        "rlgen opens no pickled weights; convert them to safetensors once": "model.allow_pickle",
        "rlgen runs no code of a data set; convert it to files": "data.trust_remote_code",
        "it stands at the top of a recipe file, not in --set": "extends",
        "the trainer cannot compute log-probs that a penalty changes; see `rlgen docs sampling`": (
            "rollout.repetition_penalty rollout.presence_penalty rollout.frequency_penalty"
        ),
        "did you mean `stop`?": "rollout.stop_strings rollout.stop_words",
        "set rollout.prompts_per_step and rollout.group_size": "rollout.batch_size",
        "the log-prob of every sampled token is recorded always": "rollout.logprobs",
        "rlgen uses no dropout: the trainer must score exactly what the engine sampled": "model.lora.dropout",
        "did you mean `rank`?": "model.lora.r",
        "did you mean `alpha`?": "model.lora.lora_alpha",
        "remove it: an adapter has no bias, and is of a language model": "model.lora.bias model.lora.task_type",
        "set model.quantization to nf4, with model.lora": "model.load_in_4bit",
        "set model.quantization to int8, with model.lora": "model.load_in_8bit",
        "write `lora: {rank: 32}`": "model.adapter model.peft",
        "write `lora: {}` and `quantization: nf4`": "model.qlora",
        "set rollout.prompts_per_step and rollout.group_size; micro-batches follow from micro_batch_tokens": "optim.batch_size",
        "set rollout.prompts_per_step; micro-batches follow from micro_batch_tokens": "optim.per_device_train_batch_size",
        "micro-batches follow from optim.micro_batch_tokens and change no result": "optim.gradient_accumulation_steps",
        "did you mean `learning_rate`?": "optim.lr",
        "did you mean `kind`?": "optim.name optim.type",
        "AdamW has torch's betas and epsilon": "optim.betas optim.eps optim.momentum",
        "an engine of this kind has no server; set engine.kind to server": "engine.url",
        "a recipe holds no secrets: engine.token_env names the environment variable that holds the token": "engine.api_key",
        "did you mean `every`?": "eval.steps",
        "no process computes layers alone; `tensor` splits each layer, and `strategy: fsdp` divides weights": (
            "processes.pipeline_parallel_size processes.pp_size"
        ),
        "did you mean `context`?": "processes.context_parallel_size processes.cp_size processes.sequence_parallel_size",
        "did you mean `tensor`?": "processes.tensor_parallel_size processes.tp_size processes.tensor_parallel processes.tp",
        "did you mean `experts`?": "processes.expert_parallel_size processes.ep_size processes.expert_parallel",
        "did you mean `group_size`?": "eval.n",
        "pass@k is computed for each power of two up to `group_size`": "eval.k",
        "did you mean `source`?": "eval.dataset data.path data.data_files data.train",
        "did you mean `subset`?": "data.name data.config",
        "did you mean `limit`?": "data.max_samples data.num_samples eval.max_samples eval.num_samples",
        "the whole data set is read": "data.streaming",
        "write `columns: {prompt: NAME}`": "data.prompt_column",
        "write `columns: {prompt: ..., answer: NAME}`": "data.answer_column",
        "write `eval: {source: ...}`": "data.test data.validation",
        "did you mean `answer`?": (
            "data.columns.label data.columns.ground_truth data.columns.completion data.columns.response data.columns.solution"
        ),
        "data.chat holds for evaluations too": "eval.chat",
        "data.system holds for evaluations too": "eval.system",
        "eval.rewards scores completions": "eval.metrics",
        "did you mean `use`?": "rewards.*.path rewards.*.function tools.*.path",
        "write `use: file.py:function`: its schema follows from its types and its docstring": "tools.*.function tools.*.schema",
        "rollout.max_turns bounds the calls of a completion": "tools.*.max_calls",
        "a recipe holds no secrets: `key_env` names the variable of the environment that holds the key": "rewards.*.args.api_key",
        "did you mean `url`?": "rewards.*.args.base_url",
        "did you mean `path`?": "rewards.*.args.model",
        "did you mean `name`?": "sinks.*.run_name",
        "did you mean `folder`?": "sinks.*.log_dir sinks.*.logdir",
        "did you mean `uri`?": "sinks.*.tracking_uri",
        "write `sentinel: {on_drift: warn}`: it has no switch": "sentinel.enabled",
        "did you mean `on_drift`?": "sentinel.action",
        "did you mean `ref_kl`?": "health.kl",
        "did you mean `count`?": "processes.gpus",
    }
)
REFUSED_BY_KIND = {
    "rloo": {
        "trainer.loss": "RLOO has one loss; trainer.kind grpo has a family of them",
        "trainer.aggregation": "RLOO sums over each completion; trainer.kind grpo has a choice",
        "trainer.scale_rewards": "RLOO does not divide by a standard deviation; see normalize_advantages",
    },
    "online_dpo": {"trainer.kl": "the loss itself contains the reference; trainer.beta sets its strength"},
}

# Answer -> the keys of verl, OpenRLHF, axolotl, Unsloth, prime-rl and others that get it, in any place.
OTHER_TOOLS = by_word(
    {
        "renamed to `optim.learning_rate`": "lr actor_lr",
        "set rollout.prompts_per_step and rollout.group_size: a step samples their product": (
            "batch_size train_batch_size rollout_batch_size"
        ),
        "renamed to `rollout.group_size`": "n rollout_n n_samples_per_prompt rollouts_per_example best_of",
        "renamed to `rollout.max_completion_tokens`": "max_tokens max_response_length generate_max_len",
        "renamed to `data.max_prompt_tokens`": "prompt_max_len max_seq_len",
        "write data.max_prompt_tokens and rollout.max_completion_tokens": "sequence_len max_seq_length context_length",
        "renamed to `trainer.beta`": "kl_beta kl_loss_coef",
        "set trainer.beta above 0; trainer.kl says where the KL goes": "use_kl_loss use_kl_in_reward",
        "renamed to `trainer.clip_low`": "clip_ratio clip_ratio_low eps_clip",
        "renamed to `trainer.clip_high`": "clip_ratio_high eps_clip_high",
        "renamed to `trainer.updates_per_rollout`": "ppo_epochs mu",
        "an update takes all samples of a step; trainer.updates_per_rollout says how many follow": (
            "ppo_mini_batch_size mini_batch_size num_mini_batches"
        ),
        "write `trainer: {kind: grpo}`, rloo or online_dpo": (
            "algorithm adv_estimator advantage_estimator advantage rl method rlhf"
        ),
        "write `trainer: {kind: grpo}`; `rlgen docs coming-from-trl` has TRL's options": "trl grpo dpo ppo",
        "no value model is trained: the group's mean replaces it": "critic value_model gamma lam gae_lambda",
        "the reference is the model at the start; trainer.beta weighs the KL to it": "ref_model reference_model reference",
        "write it into the sections model, rollout, engine, trainer and optim; `rlgen docs recipe`": "actor_rollout_ref actor",
        "run.steps is epochs × rows / rollout.prompts_per_step": "epochs num_epochs total_epochs max_epochs num_episodes",
        "renamed to `run.steps`": "total_training_steps training_steps",
        "renamed to `run.name`": "experiment_name",
        "renamed to `run.dir`": "output checkpoint_dir",
        "write `sinks: [{kind: wandb, project: mine}]`": "project_name",
        "renamed to `model.path`": "model_name pretrain base_model",
        "renamed to `model.lora.rank`": "max_lora_rank",
        "renamed to `model.attention`": "flash_attention attn",
        "renamed to `optim.max_grad_norm`": "grad_clip clip_grad max_norm",
        "renamed to `optim.packing`": "sample_packing",
        "renamed to `data.source`": "dataset datasets_path train_files prompt_data",
        "renamed to `data.chat`": "apply_chat_template",
        "write `template_args: {enable_thinking: false}` into data": "enable_thinking",
        "write `eval: {source: heldout.jsonl}`": "val_files val_set_size test_files eval_data",
        "renamed to `data.columns.prompt`": "input_key prompt_key",
        "renamed to `data.columns.answer`": "label_key answer_key",
        "write `sinks: [{kind: wandb}]`": "wandb wandb_project use_wandb logger tensorboard",
        "metrics.jsonl has every step; trackers are in `sinks`": "logging log_freq",
        "renamed to `checkpoint.every`": "save_freq ckpt_interval",
        "in steps: `checkpoint.every`": "saves_per_epoch",
        "renamed to `eval.every`": "test_freq eval_interval",
        "in steps: `eval.every`": "evals_per_epoch",
        "a health rule with action stop ends a run early, and eval.best keeps the best checkpoint": "early_stopping patience",
        "it is a command-line option: `rlgen train RECIPE --resume`": "resume resume_from",
        "renamed to `processes.count`": "n_gpus n_gpus_per_node num_processes world_size",
        "start that many processes: `torchrun --nproc-per-node N -m rlgen train RECIPE`": "gpus num_gpus",
        "start rlgen on each machine: `torchrun --nnodes N ... -m rlgen train RECIPE`": "nnodes num_nodes",
        "a GPU is used where there is one; CUDA_VISIBLE_DEVICES chooses it, engine.devices those of servers": "device device_map",
        "processes.strategy is ddp or fsdp": "zero_stage",
        "write `engine: {kind: server, url: http://127.0.0.1:8000}`": "server_url base_url vllm_url",
        "renamed to `engine.servers`": "vllm_num_engines num_engines",
        "renamed to `engine.kind`": "fast_inference",
        "renamed to `engine.structured_regex`": "guided_regex",
        "write `model: {path: ..., lora: {rank: 32}}`": "adapter peft qlora",
        "write `optim: {learning_rate: 1.0e-6}`: the optimizer is AdamW": "optimizer optimizer_type",
        "write `rollout: {async_steps: 1}` and `engine: {kind: server, launch: true}`": "async_grpo async_mode",
        "a recipe holds no secrets: set WANDB_API_KEY in the environment": "api_key wandb_api_key",
        "merge keys are not supported: repeat the lines, or put them into a file and write `extends: FILE` at the top": "<<",
        "write `extends: FILE` at the top": "defaults base inherit include",
        'write `rollout: {use: "mine.py:function"}`, see `rlgen docs rollouts`': "rollout_func",
        "a reward model brings its own tokenizer: `rewards: [{use: reward_model, args: {path: ...}}]`": (
            "reward_processing_classes"
        ),
        "micro-batches follow from optim.micro_batch_tokens": (
            "micro_batch_size micro_train_batch_size micro_rollout_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu"
        ),
        "rlgen takes the tokenizer of `model.path`": "tokenizer",
        "write `rewards: [{use: judge, args: {url: ..., model: ...}}]`": "judge remote_rm_url",
        "write `rewards: [{use: reward_model, args: {path: ...}}]`": "reward_model",
        "write `rewards: [{use: exact_match}]`": "reward",
        'write `rewards: [{use: "rewards.py:function"}]`': "reward_fn reward_function custom_reward_function compute_score",
        "write `rewards: [{use: overlong}]`": "length_penalty",
    }
)

# Key that takes a mapping -> the key in it that a plain value must have meant: `model: NAME` means model.path.
MAIN_KEYS = by_word(
    {
        "name": "run",
        "path": "model",
        "rank": "model.lora",
        "source": "data eval",
        "prompt": "data.columns",
        "use": "rewards.* tools.* environment",
        "workers": "scoring",
        "group_size": "rollout",
        "kind": "engine trainer sinks.*",
        "mode": "trainer.correction",
        "max": "trainer.correction.geometric",
        "learning_rate": "optim",
        "every": "checkpoint rollouts",
        "on_drift": "sentinel",
        "action": "health",
        "count": "processes",
    }
)

# What a required key looks like.
EXAMPLES = {
    "model": "model: {path: Qwen/Qwen3-0.6B}",
    "model.path": "path: Qwen/Qwen3-0.6B",
    "data": "data: {source: train.jsonl, columns: {prompt: question, answer: answer}}",
    "data.source": "source: train.jsonl",
    "rewards": "rewards: [{use: exact_match}]",
    "rewards.*.use": "use: exact_match",
    "rewards.*.args.url": "url: http://127.0.0.1:8000/v1",
    "rewards.*.args.path": "path: owner/name",
    "tools.*.use": "use: tools.py:function",
    "eval.source": "source: heldout.jsonl",
    "sinks.*.kind": "kind: wandb",
}

LOSSES_OF_GRPO = [loss for loss in get_args(GRPORecipe.model_fields["loss"].annotation) if loss != "grpo"]
# Key -> what to write instead -> the values that get this answer.
OTHER_VALUES = {
    "trainer.kind": {
        "rlgen trains no value model; grpo and rloo take the mean of a group instead": "ppo",
        "online_dpo is DPO on pairs that the model has sampled": "dpo",
        "rlgen trains on rewards; fine-tune on texts with another tool first": "sft",
        "rloo is REINFORCE with the others of a group as baseline": "reinforce",
        "rloo is the nearest": "reinforce++ remax",
        "online_dpo learns from pairs": "kto simpo orpo",
        **{f"write `trainer: {{kind: grpo, loss: {loss}}}`": loss for loss in LOSSES_OF_GRPO},
    },
    "trainer.loss": {
        "it is a loss of `trainer: {kind: online_dpo}`": "sigmoid ipo hinge",
        "it is a loss of `trainer: {kind: grpo}`": " ".join(["grpo", *LOSSES_OF_GRPO]),
        "dapo and grpo clip the ratio as PPO does": "ppo",
        "`trainer: {kind: rloo}`": "reinforce",
    },
    "engine.kind": {
        "colocated is vLLM in this process, server is vLLM in others": "vllm",
        "colocated and server are vLLM": "sglang",
        "it is called transformers": "hf",
    },
    "model.dtype": {
        "set bfloat16, whose range needs no scaling of the loss": "fp16 float16 half",
        "set bfloat16, in which most models are stored": "auto",
        "did you mean `bfloat16`?": "bf16",
        "did you mean `float32`?": "fp32",
    },
    "model.quantization": {"did you mean `nf4`?": "4 4bit awq gptq", "did you mean `int8`?": "8 8bit"},
    "optim": {
        "write `optim: {learning_rate: 1.0e-6}`: the optimizer is AdamW": (
            "adam adamw adamw_torch adamw_torch_fused adamw_8bit paged_adamw_8bit sgd"
        )
    },
    "optim.kind": {"adamw_8bit saves memory": "muon sgd lion adafactor"},
    "optim.schedule": {
        "did you mean `constant`?": "none",
        "write constant, and the steps of it in optim.warmup_steps": "constant_with_warmup",
        "did you mean `cosine`?": "cosine_with_min_lr cosine_with_restarts wsd",
    },
    "trainer.scale_rewards": {"did you mean `group`?": "true std", "did you mean `none`?": "false"},
    "processes.strategy": {"did you mean `fsdp`?": "zero3 zero2 deepspeed"},
    "health.action": {"write it into a rule, such as `entropy: {action: ignore}`": "ignore"},
    "eval": {"write `eval: {source: heldout.jsonl, every: 20}`": "true"},
    "sentinel": {"write `sentinel: {on_drift: warn}`: it has no switch": "false"},
    "health": {"write `action: ignore` into a rule; without it rules warn, and stop nothing": "false"},
    "checkpoint": {"write `checkpoint: {every: N}` with N above run.steps: only the last step is saved": "false"},
}
# (key, value of it) -> what to write instead.
VALUES = {(key, value): answer for key, answers in OTHER_VALUES.items() for value, answer in by_word(answers).items()}

# Key -> what to do about a value that is no number, or out of bounds.
INSTEAD = {
    "rollout.top_k": "0 samples from all tokens",
    "run.must_save_by": "write a duration such as 3h50m",
    "checkpoint.every": "it counts steps; above run.steps only the last step is saved",
    "checkpoint.keep": "a large number keeps all",
    "eval.every": "it counts steps; remove the section `eval` to evaluate never",
    "eval.split": "write the name of a split; a share of the rows must be cut off into a file, for eval.source",
    "data.limit": "leave it out to use all rows",
    "data.source": "several files are a glob, such as 'data/*.jsonl'",
    "optim.max_grad_norm": "a large number, such as 1.0e6, clips nothing",
    "optim.packing": "leave it out: then it is used where it is faster",
    "trainer.reward_clip": "write the lowest and the highest reward, such as [-1.0, 1.0]",
}
