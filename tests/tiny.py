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
assert set(NAMES) == set(ARCHITECTURES), "every supported architecture is tested"


def tiny_hf(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random Hugging Face model. Attention is made sharp enough that heads really fire."""
    options = {**OPTIONS[name], **changes}
    config = AutoConfig.for_model(name, **options, bos_token_id=1, eos_token_id=2, pad_token_id=0)
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
