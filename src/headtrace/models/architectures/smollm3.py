"""SmolLM3: Llama in which every fourth layer does not turn its queries and keys."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="SmolLM3",
    model_type="smollm3",
    variant=lambda config: {"rotary_layers": tuple(bool(turns) for turns in config.no_rope_layers)},
)
