"""Holds the answers to keys and values that a recipe does not take, but that other tools or earlier versions do."""

# Keys of earlier versions: "trainer.old": "renamed to `new` in version 0.2.0". None so far. A list index is written `*`.
RENAMED: dict[str, str] = {}

# Keys of other tools that rlgen leaves out on purpose.
REFUSED = {
    "model.trust_remote_code": "rlgen runs no code of a model's repository; take a model whose architecture transformers has",
    "model.allow_pickle": "rlgen opens no pickled weights; convert them to safetensors once",
    "data.trust_remote_code": "rlgen runs no code of a data set; convert it to files",
    "extends": "it stands at the top of a recipe file, not in --set",
    "rollout.repetition_penalty": "the trainer cannot compute log-probs that a penalty changes; see `rlgen docs sampling`",
    "rollout.stop_strings": "did you mean `stop`?",
    "rollout.stop_words": "did you mean `stop`?",
    "rollout.batch_size": "set rollout.prompts_per_step and rollout.group_size",
    "model.lora.dropout": "rlgen uses no dropout: the trainer must score exactly what the engine sampled",
    "model.lora.r": "did you mean `rank`?",
    "model.lora.lora_alpha": "did you mean `alpha`?",
    "model.lora.target_modules": "did you mean `targets`?",
    "model.load_in_4bit": "set model.quantization to nf4, with model.lora",
    "model.load_in_8bit": "set model.quantization to int8, with model.lora",
    "optim.batch_size": "set rollout.prompts_per_step and rollout.group_size; micro-batches follow from micro_batch_tokens",
    "optim.per_device_train_batch_size": "set rollout.prompts_per_step; micro-batches follow from micro_batch_tokens",
    "optim.gradient_accumulation_steps": "micro-batches follow from optim.micro_batch_tokens and change no result",
    "optim.lr": "did you mean `learning_rate`?",
    "engine.url": "an engine of this kind has no server; set engine.kind to server",
    "model.adapter": "write `lora: {rank: 32}`",
    "model.peft": "write `lora: {rank: 32}`",
    "eval.steps": "did you mean `every`?",
    "eval.n": "did you mean `group_size`?",
    "eval.k": "pass@k is computed for each power of two up to `group_size`",
    "eval.dataset": "did you mean `source`?",
    "eval.chat": "data.chat holds for evaluations too",
    "eval.system": "data.system holds for evaluations too",
}
REFUSED_BY_KIND = {
    "rloo": {
        "trainer.loss": "RLOO has one loss; trainer.kind grpo has a family of them",
        "trainer.aggregation": "RLOO sums over each completion; trainer.kind grpo has a choice",
        "trainer.scale_rewards": "RLOO does not divide by a standard deviation; see normalize_advantages",
    },
    "online_dpo": {"trainer.kl": "the loss itself contains the reference; trainer.beta sets its strength"},
}

# Keys of verl, OpenRLHF, prime-rl and others that TRL lacks.
OTHER_TOOLS = {
    **dict.fromkeys(("lr", "actor_lr"), "renamed to `optim.learning_rate`"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "rollout_batch_size"),
        "set rollout.prompts_per_step and rollout.group_size: a step samples their product",
    ),
    **dict.fromkeys(("n", "rollout_n", "n_samples_per_prompt", "rollouts_per_example"), "renamed to `rollout.group_size`"),
    **dict.fromkeys(("max_tokens", "max_response_length", "generate_max_len"), "renamed to `rollout.max_completion_tokens`"),
    **dict.fromkeys(("prompt_max_len", "max_seq_len"), "renamed to `data.max_prompt_tokens`"),
    **dict.fromkeys(("kl_beta", "kl_loss_coef"), "renamed to `trainer.beta`"),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "eps_clip"), "renamed to `trainer.clip_low`"),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), "renamed to `trainer.clip_high`"),
    **dict.fromkeys(("ppo_epochs", "mu"), "renamed to `trainer.updates_per_rollout`"),
    **dict.fromkeys(("algorithm", "adv_estimator", "advantage_estimator"), "write `trainer: {kind: grpo}`, rloo or online_dpo"),
    **dict.fromkeys(
        ("critic", "value_model", "gamma", "lam", "gae_lambda"), "no value model is trained: the group's mean replaces it"
    ),
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs"), "run.steps is epochs × rows / rollout.prompts_per_step"),
    **dict.fromkeys(("model_name", "pretrain", "base_model"), "renamed to `model.path`"),
    **dict.fromkeys(("dataset", "datasets_path", "train_files", "prompt_data"), "renamed to `data.source`"),
    **dict.fromkeys(("input_key", "prompt_key"), "renamed to `data.columns.prompt`"),
    **dict.fromkeys(("label_key", "answer_key"), "renamed to `data.columns.answer`"),
    **dict.fromkeys(("wandb", "wandb_project", "use_wandb", "logger", "tensorboard"), "write `sinks: [{kind: wandb}]`"),
    **dict.fromkeys(("save_freq", "ckpt_interval"), "renamed to `checkpoint.every`"),
    **dict.fromkeys(("test_freq", "eval_interval"), "renamed to `eval.every`"),
    **dict.fromkeys(("resume", "resume_from"), "it is a command-line option: `rlgen train RECIPE --resume`"),
    **dict.fromkeys(("n_gpus", "n_gpus_per_node", "num_processes", "world_size"), "renamed to `processes.count`"),
    **dict.fromkeys(("rl", "method", "rlhf"), "write `trainer: {kind: grpo}`, rloo or online_dpo"),
    **dict.fromkeys(
        ("trl", "grpo", "dpo", "ppo"), "write `trainer: {kind: grpo}`; `rlgen docs coming-from-trl` has TRL's options"
    ),
    **dict.fromkeys(("adapter", "peft"), "write `model: {path: ..., lora: {rank: 32}}`"),
    **dict.fromkeys(("optimizer", "optimizer_type"), "write `optim: {learning_rate: 1.0e-6}`: the optimizer is AdamW"),
    **dict.fromkeys(("async_grpo", "async_mode"), "write `rollout: {ahead: 1}` and `engine: {kind: server, launch: true}`"),
    **dict.fromkeys(("api_key", "wandb_api_key"), "a recipe holds no secrets: set WANDB_API_KEY in the environment"),
    "<<": "merge keys are not supported: repeat the lines, or put them into a file and write `extends: FILE` at the top",
    "rollout_func": 'write `rollout: {use: "mine.py:function"}`, see `rlgen docs rollouts`',
    "reward_processing_classes": "a reward model brings its own tokenizer: `rewards: [{use: reward_model, args: {path: ...}}]`",
    "micro_batch_size": "micro-batches follow from optim.micro_batch_tokens",
    "tokenizer": "rlgen takes the tokenizer of `model.path`",
    "judge": "write `rewards: [{use: judge, args: {url: ..., model: ...}}]`",
    "reward_model": "write `rewards: [{use: reward_model, args: {path: ...}}]`",
    "reward": "write `rewards: [{use: exact_match}]`",
}

# Key that takes a mapping -> the key in it that a plain value must have meant: `model: NAME` means model.path.
MAIN_KEYS = {
    "run": "name",
    "model": "path",
    "model.lora": "rank",
    "data": "source",
    "data.columns": "prompt",
    "rewards.*": "use",
    "scoring": "workers",
    "rollout": "group_size",
    "engine": "kind",
    "trainer": "kind",
    "trainer.correction": "mode",
    "optim": "learning_rate",
    "checkpoint": "every",
    "rollouts": "every",
    "sentinel": "on_drift",
    "health": "action",
    "processes": "count",
    "eval": "source",
    "sinks.*": "kind",
}

# What a required key looks like.
EXAMPLES = {
    "model": "model: {path: Qwen/Qwen3-0.6B}",
    "model.path": "path: Qwen/Qwen3-0.6B",
    "data": "data: {source: train.jsonl, columns: {prompt: question, answer: answer}}",
    "data.source": "source: train.jsonl",
    "rewards": "rewards: [{use: exact_match}]",
    "rewards.*.use": "use: exact_match",
    "eval.source": "source: heldout.jsonl",
    "sinks.*.kind": "kind: wandb",
}

# (key, value of it) -> what to write instead.
LOSSES_OF_GRPO = ("dapo", "dr_grpo", "bnpo", "cispo", "gspo", "gspo_token", "sapo", "luspo", "vespo")
VALUES = {
    ("trainer.kind", "ppo"): "rlgen trains no value model; grpo and rloo take the mean of a group instead",
    ("trainer.kind", "dpo"): "online_dpo is DPO on pairs that the model has sampled",
    ("trainer.kind", "sft"): "rlgen trains on rewards; fine-tune on texts with another tool first",
    ("trainer.kind", "reinforce"): "rloo is REINFORCE with the others of a group as baseline",
    **{("trainer.kind", loss): f"write `trainer: {{kind: grpo, loss: {loss}}}`" for loss in LOSSES_OF_GRPO},
    **dict.fromkeys(
        [("trainer.loss", name) for name in ("sigmoid", "ipo", "hinge")], "it is a loss of `trainer: {kind: online_dpo}`"
    ),
    **dict.fromkeys([("trainer.loss", name) for name in ("grpo", *LOSSES_OF_GRPO)], "it is a loss of `trainer: {kind: grpo}`"),
    ("trainer.loss", "ppo"): "dapo and grpo clip the ratio as PPO does",
    ("trainer.loss", "reinforce"): "`trainer: {kind: rloo}`",
    ("engine.kind", "vllm"): "colocated is vLLM in this process, server is vLLM in others",
    ("engine.kind", "sglang"): "colocated and server are vLLM",
    ("engine.kind", "hf"): "it is called transformers",
    ("model.dtype", "fp16"): "set bfloat16, whose range needs no scaling of the loss",
    ("model.dtype", "float16"): "set bfloat16, whose range needs no scaling of the loss",
    ("model.dtype", "auto"): "set bfloat16, in which most models are stored",
    ("model.dtype", "bf16"): "did you mean `bfloat16`?",
    ("model.dtype", "fp32"): "did you mean `float32`?",
    ("model.quantization", "4bit"): "did you mean `nf4`?",
    ("model.quantization", "8bit"): "did you mean `int8`?",
    **dict.fromkeys(
        [
            ("optim", name)
            for name in ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "sgd")
        ],
        "write `optim: {learning_rate: 1.0e-6}`: the optimizer is AdamW",
    ),
    ("optim.schedule", "none"): "did you mean `constant`?",
}
