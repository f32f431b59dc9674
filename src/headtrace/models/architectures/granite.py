"""Granite: Llama whose writes, embeddings, attention scores and logits are each multiplied by a number."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Granite",
    model_type="granite",
    variant=lambda config: {
        "write_multiplier": config.residual_multiplier,
        "logit_multiplier": 1 / config.logits_scaling,
    },
)
