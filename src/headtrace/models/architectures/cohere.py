"""Cohere (Command-R): parallel block with one LayerNorm, interleaved rotary, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Cohere",
    model_type="cohere",
    norm="layer",
    mlp_norm="input_layernorm",
    parallel=lambda config: True,
    rotary_pairs="interleaved",
    rotary_tables="interleaved",
    rotary_in_float32=True,
    query_key_norm_kind="layer",
    variant=lambda config: {
        "logit_multiplier": config.logit_scale,
        "query_key_norm": ("q_norm", "k_norm") if config.use_qk_norm else None,
    },
)
