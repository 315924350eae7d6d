"""Maps every option of TRL to a recipe: for the message about an unknown key, and for the page `coming-from-trl`.

The options are those of TRL's GRPOConfig, RLOOConfig and OnlineDPOConfig with what they inherit from TrainingArguments, of its
ModelConfig and ScriptArguments, and some of earlier versions. A test compares them with the classes.
"""

from typing import Literal, NamedTuple

from rlgen.recipe.hints import by_word

Verdict = Literal["renamed", "derived", "not needed", "not supported"]


class Option(NamedTuple):
    """What becomes of one option: Option("num_generations", "renamed", "`rollout.group_size`")"""

    name: str
    verdict: Verdict
    said: str  # the key with what differs, what it is derived from, why it is not needed, or what to use instead

    @property
    def hint(self) -> str:
        """Returns the answer to the option as an unknown key of a recipe."""
        if self.verdict != "renamed":
            return f"{self.verdict}{' from' if self.verdict == 'derived' else ':'} {self.said}"
        return f"here it is {self.said}" if f".{self.name}`" in self.said else f"renamed to {self.said}"


# Section -> its keys that TRL has by the same name.
SAME = {
    "model": "gradient_checkpointing",
    "model.lora": "use_rslora",
    "rollout": "temperature top_p top_k min_p",
    "trainer": "delta scale_rewards normalize_advantages missing_eos_penalty",
    "optim": "learning_rate weight_decay max_grad_norm",
}
# Key -> the options that it replaces.
RENAMED = {f"{section}.{name}": name for section, names in SAME.items() for name in names.split()} | {
    "model.path": "model_name_or_path",
    "model.revision": "model_revision",
    "model.dtype": "dtype torch_dtype bf16",
    "model.attention": "attn_implementation",
    "model.fp32_head": "cast_lm_head_to_fp32",
    "model.compile": "torch_compile",
    "model.lora": "use_peft peft_config",
    "model.lora.rank": "lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "lora_target_modules",
    "model.quantization": "load_in_4bit load_in_8bit",
    "data.source": "dataset_name train_dataset",
    "data.subset": "dataset_config",
    "data.split": "dataset_train_split",
    "data.max_prompt_tokens": "max_prompt_length max_length",
    "data.shuffle": "shuffle_dataset train_sampling_strategy",
    "data.template_args": "chat_template_kwargs",
    "rewards": "reward_funcs reward_model_name_or_path reward_model_path",
    "rewards.*.weight": "reward_weights",
    "rollout.group_size": "num_generations",
    "rollout.max_completion_tokens": "max_completion_length max_new_tokens response_length",
    "rollout.max_turns": "max_tool_calling_iterations",
    "engine.kind": "use_vllm vllm_mode",
    "engine.model_impl": "vllm_model_impl",
    "engine.sleep": "vllm_enable_sleep_mode",
    "engine.structured_regex": "vllm_structured_outputs_regex vllm_guided_decoding_regex",
    "engine.url": "vllm_server_base_url vllm_server_host vllm_server_port",
    "engine.timeout": "vllm_server_timeout",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "engine.max_model_len": "vllm_max_model_length",
    "engine.tensor_parallel_size": "vllm_tensor_parallel_size",
    "trainer.loss": "loss_type importance_sampling_level",
    "trainer.beta": "beta kl_coef init_kl_coef",
    "trainer.kl": "use_bias_correction_kl",
    "trainer.updates_per_rollout": "num_iterations num_ppo_epochs",
    "trainer.clip_low": "epsilon cliprange",
    "trainer.clip_high": "epsilon_high",
    "trainer.combine_rewards": "multi_objective_aggregation",
    "trainer.mask_truncated": "mask_truncated_completions",
    "trainer.top_entropy": "top_entropy_quantile",
    "trainer.entropy_bonus": "entropy_coef",
    "trainer.off_policy_max": "off_policy_mask_threshold",
    "trainer.sapo_tau_negative": "sapo_temperature_neg",
    "trainer.sapo_tau_positive": "sapo_temperature_pos",
    "trainer.vespo_k_positive": "vespo_k_pos",
    "trainer.vespo_lambda_positive": "vespo_lambda_pos",
    "trainer.vespo_k_negative": "vespo_k_neg",
    "trainer.vespo_lambda_negative": "vespo_lambda_neg",
    "trainer.reward_clip": "reward_clip_range",
    "trainer.correction.mode": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "trainer.correction.max": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "trainer.correction.min": "vllm_importance_sampling_clip_min",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "warmup_steps warmup_ratio",
    "run.steps": "max_steps num_train_epochs total_episodes",
    "run.seed": "seed data_seed",
    "run.deterministic": "full_determinism",
    "run.name": "run_name exp_name",
    "run.dir": "output_dir",
    "checkpoint.every": "save_steps save_strategy",
    "checkpoint.keep": "save_total_limit",
    "rollouts.every": "log_completions",
    "processes.strategy": "fsdp",
    "processes.timeout": "ddp_timeout",
    "eval.source": "eval_dataset",
    "eval.split": "dataset_test_split",
    "eval.every": "eval_steps eval_strategy evaluation_strategy do_eval eval",
    "eval.group_size": "num_generations_eval",
    "eval.at_start": "eval_on_start",
    "eval.best": "load_best_model_at_end",
    "sinks": "report_to",
    "sinks.*.project": "project",
    "sinks.*.space_id": "trackio_space_id",
}
# What is different besides the name.
DIFFERS = {
    "bf16": "bfloat16 is the default",
    "use_peft": "`lora: {}` is enough",
    "peft_config": "`lora: {rank: 32, alpha: 64.0}`",
    "load_in_4bit": "nf4",
    "load_in_8bit": "int8",
    "train_sampling_strategy": "true is random, false is sequential",
    "max_length": "prompt and completion have a limit each",
    "reward_funcs": "a list: `[{use: exact_match}, {use: 'rewards.py:mine'}]`; functions for TRL work if prompts are texts",
    "reward_model_name_or_path": "an entry of the list: `{use: reward_model, args: {path: ...}}`",
    "reward_model_path": "an entry of the list: `{use: reward_model, args: {path: ...}}`",
    "use_vllm": "colocated, the default, and server use vLLM; transformers does not",
    "vllm_mode": "colocate is called colocated",
    "vllm_server_host": "together with the port, like http://127.0.0.1:8000; `rlgen serve RECIPE` prints it",
    "vllm_server_port": "together with the host, like http://127.0.0.1:8000; `rlgen serve RECIPE` prints it",
    "importance_sampling_level": "sequence is `loss: gspo`; with kind rloo it is `trainer.ratio`",
    "use_bias_correction_kl": "k3_is has it, k3 does not",
    "epsilon": "the upper one is `trainer.clip_high`",
    "cliprange": "the upper one is `trainer.clip_high`",
    "scale_rewards": "true is group, false is none",
    "multi_objective_aggregation": "sum_then_normalize is sum",
    "vllm_importance_sampling_correction": "false is none",
    "warmup_ratio": "steps, not a share",
    "num_train_epochs": "epochs × rows / rollout.prompts_per_step",
    "total_episodes": "episodes / rollout.prompts_per_step / rollout.group_size",
    "data_seed": "one seed decides all",
    "output_dir": "the run's folder is run.dir/run.name",
    "save_strategy": "in steps; the last step is always saved",
    "log_completions": "by default every step's samples are written; `rlgen rollouts RUN` shows them",
    "fsdp": "fsdp or ddp",
    "eval_strategy": "in steps",
    "evaluation_strategy": "in steps",
    "do_eval": "an `eval` section with a source is enough",
    "load_best_model_at_end": "the best checkpoint is kept; `rlgen checkpoints list RUN` says which it is",
    "eval": "a section: `eval: {source: heldout.jsonl, every: 20}`",
    "report_to": "a list: `sinks: [{kind: wandb}]`; `rlgen docs sinks`",
    "project": "`sinks: [{kind: trackio, project: mine}]`; wandb has it, too",
    "trackio_space_id": "`sinks: [{kind: trackio, space_id: me/curves}]`",
}
# What it follows from -> the options.
DERIVED = {
    "rollout.prompts_per_step × rollout.group_size; optim.micro_batch_tokens splits this batch and does not change the result": (
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation"
    ),
    "the machine: rlgen uses a GPU if there is one": "use_cpu",
    "the launcher, torchrun or accelerate": "local_rank ddp_backend",
    "engine.dtype and model.dtype: evaluation uses the same engine as training": "bf16_full_eval fp16_full_eval",
    "free ports of the machine": "vllm_group_port",
}
# Why nobody needs it -> the options.
NOT_NEEDED = {
    "dropout is always off: with it, the trainer's log-probs would not be those of the engine": "disable_dropout lora_dropout",
    "prompts are tokenised once, before step 1, and read from one table": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"
        " dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"
    ),
    "rlgen packs rows, or sorts them by length and pads them to the longest of their micro-batch": (
        "pad_to_multiple_of length_column_name"
    ),
    "every column of the data reaches the rewards under its own name": "remove_unused_columns label_names",
    "rewards score a completion; there are no labels": "label_smoothing_factor",
    "denominators of the loss are counted over all processes": "average_tokens_across_devices",
    "the head is computed in chunks, never as a whole": "use_liger_kernel liger_kernel_config",
    "the engine has its own cache": "use_cache cache_implementation",
    "engine.kind colocated is vLLM, which batches continuously": (
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged"
    ),
    "`rlgen estimate RECIPE` counts the memory, and run.probe_max tries the largest batch": (
        "auto_find_batch_size torch_empty_cache_steps skip_memory_metrics"
    ),
    "metrics.jsonl has every step": (
        "logging_strategy logging_steps logging_first_step log_on_each_node include_num_input_tokens_seen"
    ),
    "an update with a number that is not finite is skipped and counted; see optim.max_nonfinite": "logging_nan_inf_filter",
    "the log is logs/rlgen.log in the run's folder, and the console adapts to the terminal": (
        "log_level log_level_replica disable_tqdm"
    ),
    "rollouts/ has every sample; `rlgen rollouts RUN` filters and shows them": (
        "num_completions_to_print log_unique_prompts num_sample_generations"
    ),
    "an `eval` section samples with the run's engine and scores with its rewards": (
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object"
        " eval_accumulation_steps include_for_metrics batch_eval_metrics"
    ),
    "an `eval` section evaluates every eval.every steps, and with eval.at_start before step 1": "eval_delay",
    "eval.best keeps the checkpoint with the highest eval/reward/mean": "metric_for_best_model greater_is_better",
    "a checkpoint always holds what an exact resume needs; `rlgen export` writes the model alone": "save_only_model",
    "a run's folder is shared by all machines": "save_on_each_node",
    "SIGTERM or Ctrl-C saves after the step and exits with 75; run.must_save_by saves before a deadline": (
        "enable_jit_checkpoint"
    ),
    "`rlgen train RECIPE --resume` resumes exactly, with the same data and random states": (
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    "the sentinel compares engine and trainer before step 1, after each sync and on every batch": "debug",
    "there is a command for each: `rlgen train`, `rlgen eval`": "do_train do_predict",
    "rlgen wraps the model itself": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    "rlgen has no DeepSpeed; with processes.strategy fsdp it gathers weights for the engine": "ds3_gather_for_generation",
    "the token of the hub comes from `hf auth login` or HF_TOKEN": "hub_token",
}
# What to use instead -> the options.
NOT_SUPPORTED = {
    "use rollout.temperature, top_p, top_k and min_p; the trainer cannot recompute log-probs after a penalty": (
        "repetition_penalty generation_kwargs"
    ),
    "rlgen runs no code of a repository; take a model whose architecture transformers has": "trust_remote_code",
    "write model.dtype, model.attention and model.revision": "model_init_kwargs",
    "the loss has no term for a router": "router_aux_loss_coef",
    "model.dtype is bfloat16 or float32": "fp16 half_precision_backend",
    "torch's own precision is kept": "tf32",
    "layers are checkpointed whole: model.gradient_checkpointing": "gradient_checkpointing_kwargs",
    "model.compile uses torch's default backend and mode": "torch_compile_backend torch_compile_mode",
    "leave it out: with noise, the trainer's log-probs would not be those of the engine": "neftune_noise_alpha",
    "the optimizer is AdamW with torch's betas and epsilon; see the section optim": (
        "optim optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon"
    ),
    "optim.schedule is constant, linear or cosine": "lr_scheduler_kwargs",
    "the reference stays the model at the start; to change it, start a new run from a checkpoint": (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    ),
    "trainer.entropy_bonus is constant; health.entropy warns if the entropy is low": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "rollouts/ keeps texts and ids of all samples, and no pictures": "log_multimodal",
    "processes.strategy is ddp or fsdp": "deepspeed fsdp_config accelerator_config parallelism_config",
    "a run uploads nothing; `rlgen export RUN --out DIR --push-to-hub REPO` sends the model": (
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision log_completions_hub_repo"
    ),
    "write `sinks: [{kind: trackio, space_id: me/curves}]`; trackio creates the Space's bucket": (
        "trackio_bucket_id trackio_static_space_id"
    ),
    "model.lora is plain LoRA of linear layers": "lora_modules_to_save lora_task_type lora_target_parameters use_dora",
    "model.quantization is nf4 or int8": "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
    "rlgen reads the whole data set": "dataset_streaming",
    "write data.source": "datasets",
    "processes.strategy is ddp or fsdp, which need no list of buffers": "ignore_bias_buffers",
}
SAID: dict[Verdict, dict[str, str]] = {
    "renamed": {name: f"`{key}`" + (f" ({DIFFERS[name]})" if name in DIFFERS else "") for name, key in by_word(RENAMED).items()},
    "derived": by_word(DERIVED),
    "not needed": by_word(NOT_NEEDED),
    "not supported": by_word(NOT_SUPPORTED),
}
OPTIONS = dict(sorted((name, Option(name, verdict, said)) for verdict, answers in SAID.items() for name, said in answers.items()))
