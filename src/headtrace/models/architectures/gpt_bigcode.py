"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 in which all heads of a layer share keys and values."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import gpt2
from headtrace.models.architectures.facts import fused_linear

ARCHITECTURE = replace(
    gpt2.ARCHITECTURE,
    name="GPT-BigCode / StarCoder",
    model_type="gpt_bigcode",
    projections=fused_linear("c_attn", "c_proj", "groups"),
    variant=lambda config: {"n_kv_heads": 1 if config.multi_query else config.num_attention_heads},
)
