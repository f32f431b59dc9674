"""Families that normalise what attention and MLP write before adding it to the residual: Gemma, OLMo-2 and others."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures.facts import Architecture
from headtrace.models.architectures.llama_like import LLAMA

# Softcaps, alternating windows, a query scale of its own; norms store gain - 1.
GEMMA2 = replace(
    LLAMA,
    name="Gemma-2",
    model_type="gemma2",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    mlp_write="post_feedforward_layernorm",
    gain_offset=1.0,
)

# No attention softcap, but QK-norm and two rotary bases.
GEMMA3 = replace(
    GEMMA2,
    name="Gemma-3 (text)",
    model_type="gemma3_text",
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="head token d_head",
    refuse=lambda config: "its attention is bidirectional" if config.use_bidirectional_attention else None,
)

# No norms before attention and MLP, QK-norm over the whole projection.
OLMO2 = replace(
    LLAMA,
    name="OLMo-2",
    model_type="olmo2",
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    mlp_write="post_feedforward_layernorm",
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="token projection",
)

POST_NORM: tuple[Architecture, ...] = (
    GEMMA2,
    GEMMA3,
    OLMO2,
    # The language model of Gemma-3 with images, which reads token ids.
    replace(
        GEMMA3,
        name="Gemma-3 (multimodal: its text part)",
        model_type="gemma3",
        layers="model.language_model.layers",
        final_norm="model.language_model.norm",
    ),
    # The first Gemma, which has no such norms: Llama with norms that store gain - 1 and scaled embeddings.
    replace(LLAMA, name="Gemma", model_type="gemma", gain_offset=1.0, refuse=GEMMA3.refuse),
    # Gemma-2 without norms after the writes.
    replace(
        GEMMA2,
        name="VaultGemma",
        model_type="vaultgemma",
        attention_post_norm=None,
        mlp_post_norm=None,
        mlp_write="mlp",
    ),
    # Sliding windows, which have rotary bases of their own.
    replace(OLMO2, name="OLMo-3", model_type="olmo3"),
    # Norms on every head; with windows, layers without one do not rotate.
    replace(
        OLMO2,
        name="EXAONE-4",
        model_type="exaone4",
        query_key_norm_axes="head token d_head",
        variant=lambda config: {
            "rotary_layers": None
            if config.sliding_window is None
            else tuple(kind == "sliding_attention" for kind in config.layer_types)
        },
    ),
)
