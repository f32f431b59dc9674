"""GPT-2: learned positions, LayerNorm, one fused projection stored as (in, out)."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, fused_linear, plain_mlp

ARCHITECTURE = Architecture(
    name="GPT-2",
    model_type="gpt2",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn",
    attention_norm="ln_1",
    mlp="mlp",
    mlp_norm="ln_2",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.c_fc", "mlp.c_proj", "mlp.act"),
    projections=fused_linear("c_attn", "c_proj"),
    norm="layer",
    rotary=False,
    refuse=lambda config: "it has cross-attention" if config.add_cross_attention else None,
)
