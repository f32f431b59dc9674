"""Gemma (the first): Llama with norms that store gain - 1 and embeddings scaled by sqrt(d_model)."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import gemma3, llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Gemma",
    model_type="gemma",
    gain_offset=1.0,
    refuse=gemma3.ARCHITECTURE.refuse,
)
