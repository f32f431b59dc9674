"""Nemotron and Minitron: LayerNorm that stores gain - 1, partial rotary, a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Nemotron / Minitron",
    model_type="nemotron",
    norm="layer",
    gain_offset=1.0,
    mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
)
