"""nanochat: norms without gains, on queries and keys, too (after they have turned, which is the same)."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import plain_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="nanochat",
    model_type="nanochat",
    mlp_parts=plain_mlp("mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
    rotary_backwards=True,
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="head token d_head",
)
