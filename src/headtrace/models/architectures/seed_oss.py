"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Seed-OSS",
    model_type="seed_oss",
)
