"""Families whose MLP reads what attention reads, in the same block: GPT-J, GPT-NeoX, Falcon, Phi, Cohere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headtrace.models.architectures.facts import (
    Architecture,
    OwnAttention,
    Projections,
    fused_linear,
    plain_mlp,
    separate_linears,
    split_columns,
)
from headtrace.models.architectures.llama_like import LLAMA

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor, nn

# -- GPT-J and CodeGen ---------------------------------------------------------------------------------------


def _gptj_tables(attention: nn.Module, positions: Int[Tensor, "#batch token"]) -> tuple[Tensor, Tensor]:
    import torch

    table: Tensor = attention.embed_positions  # type: ignore[assignment]
    weight: Tensor = attention.get_submodule("out_proj").weight  # type: ignore[assignment]
    sin, cos = table.to(positions.device)[positions].to(weight.dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


# One LayerNorm per block; partial, interleaved rotary, made in the attention module.
GPTJ = Architecture(
    name="GPT-J",
    model_type="gptj",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn",
    attention_norm="ln_1",
    mlp="mlp",
    mlp_norm="ln_1",
    mlp_write="mlp",
    mlp_parts=plain_mlp("mlp.fc_in", "mlp.fc_out", "mlp.act"),
    parallel=lambda config: True,
    projections=separate_linears("out_proj"),
    norm="layer",
    rotary_pairs="interleaved",
    own_rotary=_gptj_tables,
    own_attention=OwnAttention("_attn"),
    blocks_return_tuples=True,
)


def _codegen_projections(attention: nn.Module, d_head: int) -> Projections:
    """One fused projection, cut into four parts of queries, values and keys."""
    fused, out = attention.get_submodule("qkv_proj"), attention.get_submodule("out_proj")
    weight: Tensor = fused.weight.T  # type: ignore[assignment]
    W_Q, W_V, W_K = (
        split_columns(part.flatten(1), weight.shape[0] // d_head)
        for part in weight.reshape(len(weight), 4, 3, -1).unbind(dim=2)
    )
    W_O: Tensor = out.weight.T.reshape(len(W_Q), d_head, -1)  # type: ignore[operator]
    return Projections(W_Q, W_K, W_V, W_O, None, None, None, None)


CODEGEN = replace(GPTJ, name="CodeGen", model_type="codegen", projections=_codegen_projections)

# -- GPT-NeoX and Pythia -------------------------------------------------------------------------------------

# Partial rotary; one fused projection, interleaved by head.
GPT_NEOX = Architecture(
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

# -- Falcon --------------------------------------------------------------------------------------------------


def _falcon_projections(attention: nn.Module, d_head: int) -> Projections:
    heads = fused_linear("query_key_value", "dense", "groups")(attention, d_head)
    if not attention.new_decoder_architecture:
        return heads
    # The newer models give every query head a key and a value of its own before they attend.
    group = len(heads.W_Q) // len(heads.W_K)
    own = {name: getattr(heads, name) for name in ("W_K", "W_V", "b_K", "b_V")}
    return replace(
        heads, **{k: None if v is None else v.repeat_interleave(group, dim=0) for k, v in own.items()}
    )


def _falcon_parallel(config: Any) -> bool:
    return config.new_decoder_architecture or config.parallel_attn


def _falcon_variant(config: Any) -> dict[str, Any]:
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    one_key = config.multi_query and not config.new_decoder_architecture
    behind = "post_attention_layernorm" if not _falcon_parallel(config) else "input_layernorm"
    return {
        "attention_norm": "ln_attn" if two_norms else "input_layernorm",
        "mlp_norm": "ln_mlp" if two_norms else behind,
        "n_kv_heads": 1 if one_key else config.num_attention_heads,
    }


# One fused projection; most have one key-value head or a few.
FALCON = replace(
    GPT_NEOX,
    name="Falcon",
    model_type="falcon",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention="self_attention",
    mlp_norm="input_layernorm",
    parallel=_falcon_parallel,
    projections=_falcon_projections,
    own_attention=OwnAttention(),
    blocks_return_tuples=True,
    variant=_falcon_variant,
    refuse=lambda config: (
        "its positions are biases on the attention scores (ALiBi), which no component writes"
        if config.alibi
        else None
    ),
)

# -- Phi and Cohere ------------------------------------------------------------------------------------------

# One LayerNorm, biases everywhere, partial rotary.
PHI = replace(
    LLAMA,
    name="Phi-1 / Phi-2",
    model_type="phi",
    final_norm="model.final_layernorm",
    mlp_norm="input_layernorm",
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

# Command-R: one LayerNorm, interleaved rotary, scaled logits.
COHERE = replace(
    LLAMA,
    name="Cohere",
    model_type="cohere",
    norm="layer",
    mlp_norm="input_layernorm",
    parallel=lambda config: True,
    rotary_pairs="interleaved",
    rotary_tables="interleaved",
    rotary_in_float32=True,
    query_key_norm_kind="layer",
    variant=lambda config: {
        "logit_multiplier": config.logit_scale,
        "query_key_norm": ("q_norm", "k_norm") if config.use_qk_norm else None,
    },
)

# Command-R7B and Command-A: windows; layers without one do not rotate.
COHERE2 = replace(
    COHERE,
    name="Cohere-2",
    model_type="cohere2",
    variant=lambda config: {
        "logit_multiplier": config.logit_scale,
        "rotary_layers": tuple(kind == "sliding_attention" for kind in config.layer_types),
    },
)

PARALLEL = (GPTJ, CODEGEN, GPT_NEOX, FALCON, PHI, COHERE, COHERE2)
