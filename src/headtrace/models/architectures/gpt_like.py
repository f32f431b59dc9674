"""Relatives of GPT-2: LayerNorm, learned positions, a plain MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headtrace.models.architectures.facts import (
    Architecture,
    OwnAttention,
    fused_linear,
    plain_mlp,
    separate_linears,
)

# One fused projection, stored as (in, out).
GPT2 = Architecture(
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
    position_embedding="transformer.wpe",
    refuse=lambda config: "it has cross-attention" if config.add_cross_attention else None,
)


def _refuse_opt(config: Any) -> str | None:
    if not config.do_layer_norm_before:
        return (
            "this variant normalises the residual itself after each write (do_layer_norm_before=False, as in "
            "OPT-350m), so a residual is not the sum of what was written into it"
        )
    if config.word_embed_proj_dim != config.hidden_size:
        return "it projects the residual to another width before the unembedding (word_embed_proj_dim)"
    if config._remove_final_layer_norm:
        return "it has no final norm"
    return None


# Queries are scaled before the dot product.
OPT = Architecture(
    name="OPT",
    model_type="opt",
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    attention="self_attn",
    attention_norm="self_attn_layer_norm",
    mlp="fc1",
    mlp_norm="final_layer_norm",
    mlp_write="fc2",
    mlp_parts=plain_mlp("fc1", "fc2", "activation_fn"),
    projections=separate_linears("out_proj"),
    norm="layer",
    rotary=False,
    position_embedding="model.decoder.embed_positions",
    query_prescaled=True,
    refuse=_refuse_opt,
)

GPT_LIKE = (
    GPT2,
    OPT,
    # StarCoder and SantaCoder: all heads of a layer share keys and values.
    replace(
        GPT2,
        name="GPT-BigCode / StarCoder",
        model_type="gpt_bigcode",
        projections=fused_linear("c_attn", "c_proj", "groups"),
        variant=lambda config: {"n_kv_heads": 1 if config.multi_query else config.num_attention_heads},
    ),
    # Windows in every other layer, scores not scaled.
    Architecture(
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
        position_embedding="transformer.wpe",
        own_attention=OwnAttention("_attn", scale=1.0, window=lambda attention: attention.bias),  # type: ignore[return-value]
        blocks_return_tuples=True,
    ),
    replace(
        OPT,
        name="BioGPT",
        model_type="biogpt",
        layers="biogpt.layers",
        final_norm="biogpt.layer_norm",
        position_embedding="biogpt.embed_positions",
        query_prescaled=False,
        refuse=lambda config: (
            "it has cross-attention" if getattr(config, "add_cross_attention", False) else None
        ),
    ),
)
