"""Cohere-2 (Command-R7B, Command-A): Cohere with windows; layers without one do not turn."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import cohere

ARCHITECTURE = replace(
    cohere.ARCHITECTURE,
    name="Cohere-2",
    model_type="cohere2",
    variant=lambda config: {
        "logit_multiplier": config.logit_scale,
        "rotary_layers": tuple(kind == "sliding_attention" for kind in config.layer_types),
    },
)
