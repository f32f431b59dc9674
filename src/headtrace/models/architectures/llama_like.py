"""Relatives of Llama: attention and then an MLP in each block, each behind a norm of its own, with rotary positions.

First those that are just that, then those that normalise what attention and MLP write before adding it to the residual
(Gemma, OLMo-2 and others), then mixtures of experts, whose MLPs have a router. Sliding windows need no fact: they reach
headtrace through the model's own mask.
"""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures.facts import (
    Architecture,
    expert_mlp,
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
