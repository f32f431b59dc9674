"""VaultGemma: Gemma-2 without norms after the writes."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import gemma2

ARCHITECTURE = replace(
    gemma2.ARCHITECTURE,
    name="VaultGemma",
    model_type="vaultgemma",
    attention_post_norm=None,
    mlp_post_norm=None,
    mlp_write="mlp",
)
