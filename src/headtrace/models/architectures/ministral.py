"""Ministral: Mistral with windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import mistral

ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    name="Ministral",
    model_type="ministral",
)
