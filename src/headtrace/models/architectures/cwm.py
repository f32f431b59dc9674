"""CWM (Code World Model): Llama with windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="CWM",
    model_type="cwm",
)
