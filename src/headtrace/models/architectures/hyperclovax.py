"""HyperCLOVA X: Granite with norms after each write in some models."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import granite

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    name="HyperCLOVA X",
    model_type="hyperclovax",
    variant=lambda config: {
        "write_multiplier": config.residual_multiplier,
        "logit_multiplier": config.logits_scaling,
        "attention_post_norm": "post_norm1" if config.use_post_norm else None,
        "mlp_post_norm": "post_norm2" if config.use_post_norm else None,
        "mlp_write": "post_norm2",
    },
)
