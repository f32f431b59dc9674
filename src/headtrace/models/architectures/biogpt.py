"""BioGPT: learned positions, LayerNorm, biases."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import opt

ARCHITECTURE = replace(
    opt.ARCHITECTURE,
    name="BioGPT",
    model_type="biogpt",
    layers="biogpt.layers",
    final_norm="biogpt.layer_norm",
    query_prescaled=False,
    refuse=lambda config: "it has cross-attention" if getattr(config, "add_cross_attention", False) else None,
)
