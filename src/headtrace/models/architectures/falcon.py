"""Falcon: LayerNorm, one fused projection, mostly parallel blocks with one key-value head or a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from headtrace.models.architectures.facts import (
    Architecture,
    OwnAttention,
    Projections,
    fused_linear,
    plain_mlp,
)


def _projections(attention: nn.Module, d_head: int) -> Projections:
    heads = fused_linear("query_key_value", "dense", "groups")(attention, d_head)
    if not attention.new_decoder_architecture:
        return heads
    # The newer models give every query head a key and a value of its own before they attend.
    group = len(heads.W_Q) // len(heads.W_K)
    own = {name: getattr(heads, name) for name in ("W_K", "W_V", "b_K", "b_V")}
    return replace(
        heads, **{k: None if v is None else v.repeat_interleave(group, dim=0) for k, v in own.items()}
    )


def _variant(config: Any) -> dict[str, Any]:
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    one_key = config.multi_query and not config.new_decoder_architecture
    behind = "post_attention_layernorm" if not _parallel(config) else "input_layernorm"
    return {
        "attention_norm": "ln_attn" if two_norms else "input_layernorm",
        "mlp_norm": "ln_mlp" if two_norms else behind,
        "n_kv_heads": 1 if one_key else config.num_attention_heads,
    }


def _parallel(config: Any) -> bool:
    return config.new_decoder_architecture or config.parallel_attn


ARCHITECTURE = Architecture(
    name="Falcon",
    model_type="falcon",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention="self_attention",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="input_layernorm",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.act"),
    parallel=_parallel,
    projections=_projections,
    norm="layer",
    own_attention=OwnAttention(),
    blocks_return_tuples=True,
    variant=_variant,
    refuse=lambda config: (
        "its positions are biases on the attention scores (ALiBi), which no component writes"
        if config.alibi
        else None
    ),
)
