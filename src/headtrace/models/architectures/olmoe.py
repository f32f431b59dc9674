"""OLMoE: a mixture of experts, with a norm over all queries and one over all keys of a layer."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama, olmo
from headtrace.models.architectures.facts import expert_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="OLMoE",
    model_type="olmoe",
    mlp_parts=expert_mlp(),
    experts=True,
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="token projection",
    refuse=olmo.ARCHITECTURE.refuse,
)
