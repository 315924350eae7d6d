"""Shrinks the default config of a model type to one whose random model has a few million parameters at most."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WIDTH, INNER, NARROW, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 64, 4, 4, 2, 32
POSITIONS, WINDOW, EXPERTS, CHOSEN, RANK, STATES = 512, 16, 4, 2, 64, 16

# Small values by the names that configs use. `initializer_range` is that of rlgen's tiny models, for the same reason.
SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(("hidden_size_global", "ple_embed_dim", "mamba_d_ssm"), WIDTH),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dim_ff", "dff", "n_inner"), INNER),
    **dict.fromkeys(("ffn_hidden_size", "feed_forward_size", "d_inner", "intermediate_size_mlp", "mlp_dim"), INNER),
    **dict.fromkeys(("dense_intermediate_size",), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), NARROW),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), NARROW),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks", "depth", "num_layers_per_stack"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "dim_head", "kv_channels", "attention_head_size", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "index_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "global_head_dim", "rotary_dim"), HEAD_DIM),
    **dict.fromkeys(("hidden_size_per_layer_input", "query_pre_attn_scalar"), HEAD_DIM),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "hc_lowrank"), RANK),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), CHOSEN),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "first_k_dense_replace", "num_dense_layers", "o_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), STATES),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("altup_num_inputs", "num_kv_shared_layers", "hc_mult", "hc_count"), 2),
    "index_n_heads": 16,  # of fewer, many scores are 0, and which of them are chosen depends on the batch
    **dict.fromkeys(("index_topk", "mamba_chunk_size", "chunk_size"), WINDOW),
    "vocab_size_per_layer_input": 260,
    "ngram_vocab_size_base": 1000,
    "split_ngram_parts": 1,
    "initializer_range": 0.06,
}

MLA: dict[str, object] = {"num_key_value_heads": HEADS}  # keys and values of all heads are made from one latent vector
FULL_MLA = {**MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}  # the sizes for which vLLM has kernels
HEADS_ALONE: dict[str, object] = {"head_dim": HEAD_DIM}
WINDOWS: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
TWO_WIDTHS = {**WINDOWS, "global_head_dim": 2 * HEAD_DIM}  # of heads, in layers with a window and without
CONVOLUTIONS: dict[str, object] = {"layer_types": ["conv", "full_attention"] * 2}
SHARED_BLOCKS: dict[str, object] = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * HEAD_DIM,
    "num_key_value_heads": HEADS,
}
HYBRID = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
ROTATION: dict[str, object] = {"rope_type": "default", "rope_theta": 1e4}
QSA: dict[str, object] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
NEEDS_BOS: dict[str, object] = {"bos_token_id": 257}

# What the names do not say, by model type: settings that must fit each other, and lists with one entry for each layer.
FITTING: dict[str, dict[str, object]] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "minicpm3"), MLA),
    **dict.fromkeys(("axk1", "glm4_moe_lite", "longcat_flash", "youtu"), FULL_MLA),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEADS_ALONE),
    **dict.fromkeys(("cwm", "modernbert-decoder"), NEEDS_BOS),
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), WINDOWS),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), TWO_WIDTHS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTIONS),
    **dict.fromkeys(("zamba", "zamba2"), SHARED_BLOCKS),
    "emu3": {"text_config": NEEDS_BOS},
    "mllama": {"text_config": NEEDS_BOS},
    "gemma3": {"text_config": WINDOWS},
    "gemma4": {"text_config": TWO_WIDTHS},
    "gemma4_unified": {"text_config": TWO_WIDTHS},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID, **MLA},
    "qwen4_exp_text": QSA,
    "qwen4_exp": {"text_config": QSA},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROTATION, "mrope_section": [6, 5, 5]}}},
    "deepseek_v3": {**FULL_MLA, "topk_method": "noaux_tc"},  # as its checkpoints say
    "gpt_bigcode": {"num_key_value_heads": 1},
    "deepseek_v2": {**FULL_MLA, "num_experts_per_tok": CHOSEN, "n_group": 1, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": INNER},
    },
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_shared_experts": 1},
    "falcon": {"ffn_hidden_size": 4 * WIDTH},  # vLLM knows no other
    "llama4": {"text_config": {"attention_chunk_size": 128}},  # of vLLM's cache blocks on the CPU
    "llama4_text": {"attention_chunk_size": 128},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "opt": {"init_std": 0.06},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_embds": False},
    "xglm": {"init_std": 0.06},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}

# Further forms of a type, which its settings choose: they compute attention, positions or keys and values in another way.
FORMS: dict[str, dict[str, object]] = {
    "falcon:alibi": {"alibi": True, "multi_query": False, "bias": True, "num_kv_heads": None},
    "falcon:many-heads": {"multi_query": False, "parallel_attn": False, "num_kv_heads": None},
    "falcon:new": {"new_decoder_architecture": True},
    "falcon_h1:scaled-head": {"lm_head_multiplier": 0.5},
    "gpt2:scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True},
    "opt:projected": {"word_embed_proj_dim": NARROW, "do_layer_norm_before": False},
    "bert-generation:decoder": {"is_decoder": True},
    "gpt_bigcode:many-heads": {"multi_query": False, "num_key_value_heads": HEADS},
    "llama:tied": {"tie_word_embeddings": True},
    "mistral:no-window": {"sliding_window": None},
    "qwen2:window": {"use_sliding_window": True, "max_window_layers": 2},
}


def model_names() -> list[str]:
    """Returns every model type for which transformers has a causal language model, and `FORMS`."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FORMS])


def settings(default: PreTrainedConfig, fitting: Mapping[str, object]) -> dict[str, Any]:
    """Returns the small values for a config and the configs in it; `fitting` replaces single ones."""
    found: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            inner = fitting.get(name, {})
            found[name] = settings(value, inner if isinstance(inner, dict) else {})
        elif name in SMALL and value is not None:
            found[name] = SMALL[name]
    return found | {name: value for name, value in fitting.items() if not isinstance(value, dict) or name not in found}


def small_config(name: str, special: Mapping[str, object]) -> PreTrainedConfig:
    """Returns the small config of a model type or of one of its forms.

    Args:
        special: size of the vocabulary and ids of the special tokens.
    """
    kind = CONFIG_MAPPING[name.partition(":")[0]]
    chosen = settings(kind(), FITTING.get(name.partition(":")[0], {}) | FORMS.get(name, {}))
    for inner in ("text_config", "decoder_config"):
        if inner in chosen:
            chosen[inner] = {**special, **chosen[inner]}
    return kind(**{**special, **chosen})
