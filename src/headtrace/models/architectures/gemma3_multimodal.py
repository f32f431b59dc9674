"""Gemma-3 with images: its text part alone, which reads token ids."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import gemma3

ARCHITECTURE = replace(
    gemma3.ARCHITECTURE,
    name="Gemma-3 (multimodal: its text part)",
    model_type="gemma3",
    layers="model.language_model.layers",
    final_norm="model.language_model.norm",
)
