"""StableLM: LayerNorm, partial rotary; some with parallel blocks or a norm for every head."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="StableLM",
    model_type="stablelm",
    norm="layer",
    parallel=lambda config: config.use_parallel_residual,
    query_key_norm_kind="layer",
    query_key_norm_axes="head token d_head",
    variant=lambda config: {
        "mlp_norm": "input_layernorm" if config.use_parallel_residual else "post_attention_layernorm",
        "query_key_norm": ("q_layernorm", "k_layernorm") if config.qk_layernorm else None,
    },
)
