"""Helium: Llama with interleaved rotary pairs."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Helium",
    model_type="helium",
    rotary_pairs="interleaved",
)
