"""GPT-2: learned positions, LayerNorm, one fused projection stored as (in, out)."""

from __future__ import annotations

from torch import Tensor, nn

from headtrace.models.architectures.facts import Architecture, Projections, plain_mlp, split_columns


def _projections(attention: nn.Module, d_head: int) -> Projections:
    fused, out = attention.get_submodule("c_attn"), attention.get_submodule("c_proj")
    weight: Tensor = fused.weight  # type: ignore[assignment]
    bias: Tensor = fused.bias  # type: ignore[assignment]
    n_heads = weight.shape[0] // d_head
    W_Q, W_K, W_V = (split_columns(part, n_heads) for part in weight.chunk(3, dim=1))
    b_Q, b_K, b_V = (part.reshape(n_heads, d_head) for part in bias.chunk(3))
    W_O: Tensor = out.weight.reshape(n_heads, d_head, -1)  # type: ignore[operator]
    return Projections(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, out.bias)  # type: ignore[arg-type]


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
    projections=_projections,
    norm="layer",
    rotary=False,
    refuse=lambda config: "it has cross-attention" if config.add_cross_attention else None,
)
