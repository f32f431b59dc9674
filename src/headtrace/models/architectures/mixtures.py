"""Mixtures of experts: relatives of Llama whose MLPs have a router."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures.facts import expert_mlp
from headtrace.models.architectures.llama_like import GRANITE, LLAMA, OLMO, QWEN3

MIXTURES = (
    replace(LLAMA, name="Mixtral", model_type="mixtral", mlp_parts=expert_mlp(), experts=True),
    # One more expert that every token passes.
    replace(LLAMA, name="Qwen2-MoE", model_type="qwen2_moe", mlp_parts=expert_mlp(), experts=True),
    replace(QWEN3, name="Qwen3-MoE", model_type="qwen3_moe", mlp_parts=expert_mlp(), experts=True),
    # A norm over all queries and one over all keys of a layer.
    replace(
        LLAMA,
        name="OLMoE",
        model_type="olmoe",
        mlp_parts=expert_mlp(),
        experts=True,
        query_key_norm=("q_norm", "k_norm"),
        query_key_norm_axes="token projection",
        refuse=OLMO.refuse,
    ),
    replace(
        GRANITE,
        name="Granite-MoE",
        model_type="granitemoe",
        mlp="block_sparse_moe",
        mlp_write="block_sparse_moe",
        mlp_parts=expert_mlp("block_sparse_moe", "router"),
        experts=True,
    ),
)
