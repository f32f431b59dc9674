"""Tiny random models of every supported architecture, with biases and gains away from their trivial values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headtrace
from headtrace.models.architectures import ARCHITECTURES
from headtrace.vocabulary import Component

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
SCALED_ROTARY: dict[str, Any] = {
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
}

OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 61},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt_neox": {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "llama": {**SIZES, **GROUPED, **SCALED_ROTARY},
    "mistral": {**SIZES, **GROUPED, "sliding_window": 5},
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, **GROUPED, **YARN},
    "gemma2": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
    },
    "olmo2": {**SIZES, "num_key_value_heads": 2},
}
NAMES = tuple(OPTIONS)
"""The first ten architectures: every test of what holds for all of them runs on these."""

SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}
SMALL_GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
HALF_ROTARY: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
WINDOWS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MULTIPLIERS: dict[str, Any] = {
    "residual_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "logits_scaling": 2.5,
}
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.2, 1.5],
        "long_factor": [2.0, 3.0, 4.0],
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    },
}

MORE: dict[str, dict[str, Any]] = {
    "phi3": {**SMALL_GROUPED, "hidden_size": 32, **LONG_ROPE},
    "phi": {**SMALL_GROUPED, **HALF_ROTARY},
    "qwen3/windows": {**SMALL_GROUPED, "head_dim": 8, "use_sliding_window": True, **WINDOWS},
    "qwen2_moe": {
        **SMALL_GROUPED,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {**SMALL_GROUPED, **EXPERTS, "head_dim": 8},
    "mixtral": {**SMALL_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**SMALL_GROUPED, **EXPERTS},
    "granite": {**SMALL_GROUPED, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    "granitemoe": {**SMALL_GROUPED, **MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hyperclovax": {**SMALL_GROUPED, **MULTIPLIERS, "use_post_norm": True},
    "starcoder2": {**SMALL_GROUPED, "sliding_window": 5, "use_bias": True},
    "cohere": {**SMALL_GROUPED, "use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {**SMALL_GROUPED, "head_dim": 8, "logit_scale": 0.3, **WINDOWS},
    "olmo": {**SMALL_GROUPED, "clip_qkv": None},
    "olmo3": {**SMALL_GROUPED, **WINDOWS},
    "smollm3": {**SMALL_GROUPED, "no_rope_layers": [1, 0]},
    "stablelm": {**SMALL_GROUPED, **HALF_ROTARY, "use_qkv_bias": True},
    "stablelm/parallel": {
        **SMALL_GROUPED,
        **HALF_ROTARY,
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61},
    "gpt_bigcode/heads": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 61,
        "multi_query": False,
    },
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61, "rotary_dim": 4},
    "codegen": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 61,
        "rotary_dim": 4,
    },
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["local", "global"], 1]],
        "window_size": 5,
        "max_position_embeddings": 64,
        "vocab_size": 61,
    },
    "falcon": {**SMALL, "bias": True},
    "falcon/groups": {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon/sequential": {**SMALL, "multi_query": False, "parallel_attn": False},
    "glm": {**SMALL_GROUPED, "head_dim": 8, **HALF_ROTARY},
    "glm4": {**SMALL_GROUPED, "head_dim": 8, **HALF_ROTARY},
    "nemotron": {**SMALL_GROUPED, "head_dim": 8, **HALF_ROTARY},
    "exaone4": {**SMALL_GROUPED, **WINDOWS},
    "helium": {**SMALL_GROUPED, "head_dim": 8},
    "ernie4_5": {**SMALL_GROUPED, "head_dim": 8, "use_bias": True},
    "seed_oss": {**SMALL_GROUPED, "head_dim": 8, "attention_bias": True, "attention_out_bias": True},
    "apertus": {**SMALL_GROUPED},
    "arcee": {**SMALL_GROUPED, "head_dim": 8},
    "gemma": {**SMALL_GROUPED, "head_dim": 16},
    "vaultgemma": {**OPTIONS["gemma2"], "num_hidden_layers": 2},
    "ministral": {**SMALL_GROUPED, "head_dim": 8, **WINDOWS},
    "cwm": {**SMALL_GROUPED, "head_dim": 8, **WINDOWS},
    "jais2": {**SMALL_GROUPED, "head_dim": 8},
    "nanochat": {**SMALL_GROUPED},
    "biogpt": {**SMALL},
    "gemma3": {
        "text_config": {**OPTIONS["gemma3_text"], "num_hidden_layers": 2},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "boi_token_index": 58,
        "eoi_token_index": 59,
        "image_token_index": 60,
    },
}
"""The other architectures, with variants of their own (`/`): the tests of `tests/invariants/test_families.py`."""
OPTIONS |= MORE
assert {name.split("/")[0] for name in OPTIONS} == set(ARCHITECTURES), (
    "every supported architecture is tested"
)


def tiny_hf(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random Hugging Face model. Attention is made sharp enough that heads really fire."""
    options = {**OPTIONS[name], **changes}
    config = AutoConfig.for_model(
        name.split("/")[0], **options, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    return randomise(hf, dtype, seed)


def randomise(hf: Any, dtype: torch.dtype, seed: int = 0) -> Any:
    """Random weights that make heads attend sharply, with biases and gains away from their trivial values."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for label, parameter in hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            if parameter.ndim == 1 or "norm" in label:
                # Sharper queries and keys where they are normed: there only the gain decides how sharp attention is.
                parameter.add_(0.3 * noise + (0.8 if "q_norm" in label or "k_norm" in label else 0.0))
            elif "embed" in label or "wte" in label or "wpe" in label:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * 1.6 / parameter.shape[-1] ** 0.5)
    return hf


def tiny_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> headtrace.Model:
    return headtrace.load(tiny_hf(name, seed, dtype, **changes))


def prompts(seed: int = 0, lengths: tuple[int, ...] = (11, 7)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]


def top_two(model: headtrace.Model, ids: list[int]) -> tuple[int, int]:
    """An answer and a wrong answer that the heads decide, so that there is a circuit to find."""
    recording = model.record(ids)
    heads = sum(
        recording.write(Component("head", layer, head))[-1]
        for layer in range(model.n_layers)
        for head in range(model.n_heads)
    )
    weights = model.weights
    liked = weights.W_U @ (heads * weights.final_gain)
    wrong = int(liked.argmin())
    ahead = recording.last_logits() > recording.last_logits()[wrong]
    return int(liked.masked_fill(~ahead, -torch.inf).argmax()), wrong
