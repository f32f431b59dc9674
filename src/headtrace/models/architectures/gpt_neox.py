"""GPT-NeoX and Pythia: parallel block, LayerNorm, partial rotary, one fused projection interleaved by head."""

from __future__ import annotations

from torch import Tensor, nn

from headtrace.models.architectures.facts import Architecture, Projections, plain_mlp


def _projections(attention: nn.Module, d_head: int) -> Projections:
    fused, out = attention.get_submodule("query_key_value"), attention.get_submodule("dense")
    weight: Tensor = fused.weight  # type: ignore[assignment]
    bias: Tensor | None = fused.bias  # type: ignore[assignment]
    n_heads = weight.shape[0] // (3 * d_head)
    W_Q, W_K, W_V = weight.reshape(n_heads, 3, d_head, -1).transpose(2, 3).unbind(dim=1)
    b_Q, b_K, b_V = (None, None, None) if bias is None else bias.reshape(n_heads, 3, d_head).unbind(dim=1)
    W_O: Tensor = out.weight.T.reshape(n_heads, d_head, -1)  # type: ignore[operator]
    return Projections(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, out.bias)  # type: ignore[arg-type]


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
    projections=_projections,
    norm="layer",
)
