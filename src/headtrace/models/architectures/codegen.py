"""CodeGen: GPT-J with one fused projection, cut into four parts of queries, values and keys."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from headtrace.models.architectures import gptj
from headtrace.models.architectures.facts import Projections, split_columns

PARTS = 4


def _projections(attention: nn.Module, d_head: int) -> Projections:
    fused, out = attention.get_submodule("qkv_proj"), attention.get_submodule("out_proj")
    weight: Tensor = fused.weight.T  # type: ignore[assignment]
    W_Q, W_V, W_K = (
        split_columns(part.flatten(1), weight.shape[0] // d_head)
        for part in weight.reshape(len(weight), PARTS, 3, -1).unbind(dim=2)
    )
    W_O: Tensor = out.weight.T.reshape(len(W_Q), d_head, -1)  # type: ignore[operator]
    return Projections(W_Q, W_K, W_V, W_O, None, None, None, None)


ARCHITECTURE = replace(gptj.ARCHITECTURE, name="CodeGen", model_type="codegen", projections=_projections)
