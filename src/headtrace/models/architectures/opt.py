"""OPT: learned positions, LayerNorm before attention, queries scaled before the dot product."""

from __future__ import annotations

from typing import Any

from headtrace.models.architectures.facts import Architecture, plain_mlp, separate_linears


def _refuse(config: Any) -> str | None:
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


ARCHITECTURE = Architecture(
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
    query_prescaled=True,
    refuse=_refuse,
)
