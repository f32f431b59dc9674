"""GLM-4-0414: GLM with norms after each write."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import glm

ARCHITECTURE = replace(
    glm.ARCHITECTURE,
    name="GLM-4",
    model_type="glm4",
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    mlp_write="post_mlp_layernorm",
)
