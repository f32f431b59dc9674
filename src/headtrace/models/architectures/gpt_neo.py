"""GPT-Neo and TinyStories: learned positions, LayerNorm, windows in every other layer, scores not scaled."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, OwnAttention, plain_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="GPT-Neo / TinyStories",
    model_type="gpt_neo",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn.attention",
    attention_norm="ln_1",
    mlp="mlp",
    mlp_norm="ln_2",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.c_fc", "mlp.c_proj", "mlp.act"),
    projections=separate_linears("out_proj"),
    norm="layer",
    rotary=False,
    own_attention=OwnAttention("_attn", scale=1.0, window=lambda attention: attention.bias),  # type: ignore[return-value]
    blocks_return_tuples=True,
)
