"""Apertus: norms on every head, a plain MLP with an activation that was trained, too."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import qwen3
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    name="Apertus",
    model_type="apertus",
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    query_key_norm_axes="head token d_head",
)
