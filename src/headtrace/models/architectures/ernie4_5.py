"""ERNIE-4.5: Llama with interleaved rotary pairs."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="ERNIE-4.5",
    model_type="ernie4_5",
    rotary_pairs="interleaved",
    rotary_in_float32=True,
)
