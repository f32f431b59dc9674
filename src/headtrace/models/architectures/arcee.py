"""Arcee (AFM): Llama with a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Arcee",
    model_type="arcee",
    mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
)
