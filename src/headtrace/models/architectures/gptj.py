"""GPT-J: parallel block with one LayerNorm, partial rotary interleaved, made in the attention module."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headtrace.models.architectures.facts import Architecture, OwnAttention, plain_mlp, separate_linears


def _tables(attention: nn.Module, positions: Int[Tensor, "#batch token"]) -> tuple[Tensor, Tensor]:
    table: Tensor = attention.embed_positions  # type: ignore[assignment]
    weight: Tensor = attention.get_submodule("out_proj").weight  # type: ignore[assignment]
    sin, cos = table.to(positions.device)[positions].to(weight.dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


ARCHITECTURE = Architecture(
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
    own_rotary=_tables,
    own_attention=OwnAttention("_attn"),
    blocks_return_tuples=True,
)
