"""StarCoder2: LayerNorm, biases, a plain MLP, grouped queries, a sliding window."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="StarCoder2",
    model_type="starcoder2",
    norm="layer",
    mlp_parts=plain_mlp("mlp.c_fc", "mlp.c_proj", "mlp.act"),
)
