"""EXAONE-4: norms after each write and on every head; with windows, layers without one do not turn."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import olmo2

ARCHITECTURE = replace(
    olmo2.ARCHITECTURE,
    name="EXAONE-4",
    model_type="exaone4",
    query_key_norm_axes="head token d_head",
    variant=lambda config: {
        "rotary_layers": None
        if config.sliding_window is None
        else tuple(kind == "sliding_attention" for kind in config.layer_types)
    },
)
