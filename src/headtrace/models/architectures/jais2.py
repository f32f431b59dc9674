"""Jais-2: LayerNorm, biases, a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Jais-2",
    model_type="jais2",
    norm="layer",
    mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
)
