"""Relatives of Llama: attention and then an MLP in each block, each behind a norm of its own, with rotary positions.

Sliding windows need no fact: they reach headtrace through the model's own mask.
"""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures.facts import (
    Architecture,
    fused_gated_mlp,
    fused_linear,
    gated_mlp,
    plain_mlp,
    separate_linears,
)

LLAMA = Architecture(
    name="Llama",  # and SmolLM2
    model_type="llama",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    mlp_parts=gated_mlp(),
    projections=separate_linears(),
)

# An RMSNorm on every head's queries and keys.
QWEN3 = replace(LLAMA, name="Qwen3", model_type="qwen3", query_key_norm=("q_norm", "k_norm"))

# Writes, embeddings, attention scores and logits are each multiplied by a number.
GRANITE = replace(
    LLAMA,
    name="Granite",
    model_type="granite",
    variant=lambda config: {
        "write_multiplier": config.residual_multiplier,
        "logit_multiplier": 1 / config.logits_scaling,
    },
)

# A LayerNorm that has neither gain nor bias.
OLMO = replace(
    LLAMA,
    name="OLMo",
    model_type="olmo",
    norm="layer",
    refuse=lambda config: (
        "it clips queries, keys and values (clip_qkv), which is not linear" if config.clip_qkv else None
    ),
)

# Interleaved rotary pairs and a fused MLP.
GLM = replace(
    LLAMA,
    name="GLM",
    model_type="glm",
    mlp_parts=fused_gated_mlp(),
    rotary_pairs="interleaved",
)

LLAMA_LIKE = (
    LLAMA,
    QWEN3,
    GRANITE,
    OLMO,
    GLM,
    replace(LLAMA, name="Mistral", model_type="mistral"),
    replace(LLAMA, name="Ministral", model_type="ministral"),
    replace(LLAMA, name="CWM", model_type="cwm"),  # Code World Model
    # Biases on queries, keys and values.
    replace(LLAMA, name="Qwen2", model_type="qwen2"),
    replace(LLAMA, name="Seed-OSS", model_type="seed_oss"),
    # Every fourth layer does not rotate its queries and keys.
    replace(
        LLAMA,
        name="SmolLM3",
        model_type="smollm3",
        variant=lambda config: {"rotary_layers": tuple(bool(rotates) for rotates in config.no_rope_layers)},
    ),
    # Interleaved rotary pairs.
    replace(LLAMA, name="Helium", model_type="helium", rotary_pairs="interleaved"),
    replace(
        LLAMA,
        name="ERNIE-4.5",
        model_type="ernie4_5",
        rotary_pairs="interleaved",
        rotary_in_float32=True,
    ),
    # Norms after each write, too.
    replace(
        GLM,
        name="GLM-4",
        model_type="glm4",
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        mlp_write="post_mlp_layernorm",
    ),
    # Granite with norms after each write in some models.
    replace(
        GRANITE,
        name="HyperCLOVA X",
        model_type="hyperclovax",
        variant=lambda config: {
            "write_multiplier": config.residual_multiplier,
            "logit_multiplier": config.logits_scaling,
            "attention_post_norm": "post_norm1" if config.use_post_norm else None,
            "mlp_post_norm": "post_norm2" if config.use_post_norm else None,
            "mlp_write": "post_norm2",
        },
    ),
    # Fused projections in attention and MLP.
    replace(
        LLAMA,
        name="Phi-3 / Phi-4",
        model_type="phi3",
        projections=fused_linear("qkv_proj", "o_proj"),
        mlp_parts=fused_gated_mlp(),
    ),
    # Plain MLPs, without a gate.
    replace(
        LLAMA,
        name="Arcee",
        model_type="arcee",
        mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    ),
    # ... with an activation that was trained, too.
    replace(
        QWEN3,
        name="Apertus",
        model_type="apertus",
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
        query_key_norm_axes="head token d_head",
    ),
    # ... and norms without gains, on queries and keys, too (after the rotation, which is the same).
    replace(
        LLAMA,
        name="nanochat",
        model_type="nanochat",
        mlp_parts=plain_mlp("mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
        rotary_backwards=True,
        query_key_norm=("q_norm", "k_norm"),
        query_key_norm_axes="head token d_head",
    ),
    # ... and LayerNorm, with biases.
    replace(
        LLAMA,
        name="Jais-2",
        model_type="jais2",
        norm="layer",
        mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    ),
    replace(
        LLAMA,
        name="StarCoder2",
        model_type="starcoder2",
        norm="layer",
        mlp_parts=plain_mlp("mlp.c_fc", "mlp.c_proj", "mlp.act"),
    ),
    # ... and LayerNorm that stores gain - 1, with partial rotary.
    replace(
        LLAMA,
        name="Nemotron / Minitron",
        model_type="nemotron",
        norm="layer",
        gain_offset=1.0,
        mlp_parts=plain_mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    ),
    # LayerNorm and partial rotary; some have parallel blocks, or a norm for every head.
    replace(
        LLAMA,
        name="StableLM",
        model_type="stablelm",
        norm="layer",
        parallel=lambda config: config.use_parallel_residual,
        query_key_norm_kind="layer",
        query_key_norm_axes="head token d_head",
        variant=lambda config: {
            "mlp_norm": "input_layernorm" if config.use_parallel_residual else "post_attention_layernorm",
            "query_key_norm": ("q_layernorm", "k_layernorm") if config.qk_layernorm else None,
        },
    ),
)
