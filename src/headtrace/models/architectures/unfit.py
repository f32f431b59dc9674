"""Families that facts cannot describe, with the reason, so that an error can say more than that a name is unknown."""

from __future__ import annotations

from typing import Any

NO_ATTENTION = (
    "some or all of its layers keep a state or a convolution instead of attending (no scores to decompose)"
)
LATENT = "its queries and keys come from compressed (latent) vectors with a norm between, and turn in dimensions apart"
SINKS = "its heads attend to learned sinks that are no tokens, so attention does not sum to one"
ALIBI = "its positions are biases on the attention scores (ALiBi), which no component writes"
BETWEEN = "more than one linear map stands between what its heads mix and what they write: a gate, a norm, a difference"
POST_NORM = (
    "it normalises the residual itself after each write, so a residual is not the sum of what was written"
)
GAIN_AFTER_ROTARY = (
    "its norms of queries and keys have gains after the rotation, which cannot be folded into a head"
)
MIXED_RESIDUALS = "it has several residual streams, or adds to them in ways of its own"

UNFIT: dict[str, tuple[str, ...]] = {
    NO_ATTENTION: (
        *(
            "mamba",
            "mamba2",
            "falcon_mamba",
            "falcon_h1",
            "rwkv",
            "xlstm",
            "jamba",
            "bamba",
            "zamba",
            "zamba2",
        ),
        *("recurrent_gemma", "lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "kimi_linear", "minimax"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        "bailing_hybrid",
    ),
    LATENT: (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "longcat_flash", "youtu"),
        *("glm4_moe_lite", "glm_moe_dsa", "axk1", "axk2"),
    ),
    SINKS: ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "deepseek_v4", "flint", "hy_v4"),
    ALIBI: ("bloom", "mpt"),
    BETWEEN: ("afmoe", "diffllama", "bitnet"),
    POST_NORM: ("openai-gpt", "xlm", "bert", "roberta", "xlm-roberta", "camembert", "electra"),
    GAIN_AFTER_ROTARY: ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    MIXED_RESIDUALS: ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "hrm_text", "blt"),
}


def why_unfit(config: Any) -> str | None:
    """Why a family cannot be described by facts, if that is known."""
    for reason, families in UNFIT.items():
        if config.model_type in families:
            return reason
    return "it is an encoder and a decoder, not one causal model" if config.is_encoder_decoder else None
