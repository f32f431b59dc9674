"""GPT-NeoX and Pythia: parallel block, LayerNorm, partial rotary, one fused projection interleaved by head."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, fused_linear, plain_mlp

ARCHITECTURE = Architecture(
    name="GPT-NeoX / Pythia",
    model_type="gpt_neox",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    attention="attention",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.act"),
    parallel=lambda config: config.use_parallel_residual,
    projections=fused_linear("query_key_value", "dense", "groups"),
    norm="layer",
)
