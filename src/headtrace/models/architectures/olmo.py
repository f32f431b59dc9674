"""OLMo (the first): Llama with a LayerNorm that has neither gain nor bias."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="OLMo",
    model_type="olmo",
    norm="layer",
    refuse=lambda config: (
        "it clips queries, keys and values (clip_qkv), which is not linear" if config.clip_qkv else None
    ),
)
