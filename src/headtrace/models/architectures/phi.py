"""Phi-1, Phi-1.5 and Phi-2: parallel block with one LayerNorm, biases everywhere, partial rotary."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, plain_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Phi-1 / Phi-2",
    model_type="phi",
    layers="model.layers",
    final_norm="model.final_layernorm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="input_layernorm",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
    parallel=lambda config: True,
    projections=separate_linears("dense"),
    norm="layer",
    refuse=lambda config: (
        "its norms of queries and keys have biases, which belong to no component (qk_layernorm)"
        if config.qk_layernorm
        else None
    ),
)
