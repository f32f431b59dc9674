"""The architectures that headtrace can decompose exactly, as tables of facts, and those that it cannot.

To add one here, put it into the table of its nearest relatives. A package of your own adds one without a change here:
call ``register_architecture(Architecture(...))``, or name the ``Architecture`` in the entry point group
``headtrace.architectures``. `docs/how-to/add-an-architecture.md` goes through both.
"""

from __future__ import annotations

from typing import Any

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures.facts import Architecture, Projections
from headtrace.models.architectures.gpt_like import GPT_LIKE
from headtrace.models.architectures.llama_like import LLAMA_LIKE, MIXTURES, POST_NORM
from headtrace.models.architectures.parallel import PARALLEL
from headtrace.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    "headtrace.architectures",
    {facts.model_type: facts for facts in (*GPT_LIKE, *PARALLEL, *LLAMA_LIKE, *POST_NORM, *MIXTURES)},
    check=lambda found: isinstance(found, Architecture),
)
"""Every known architecture by its ``model_type``; those of installed packages are found by entry point."""

HOW_TO_ADD = "docs/how-to/add-an-architecture.md"


def register_architecture(architecture: Architecture) -> None:
    """Make a model family known under its ``model_type``, for this process."""
    ARCHITECTURES.add(architecture.model_type, architecture)


def find_architecture(config: Any) -> Architecture:
    """The facts for a transformers config, or an error that names what was given and what is supported."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        reason = why_unfit(config)
        advice = f"{HOW_TO_ADD} explains how to add one: it takes a few lines of facts."
        raise UnsupportedModelError(
            f"The architecture {config.model_type!r} is not supported{'' if reason is None else f': {reason}'}. "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}.{f' {advice}' if reason is None else ''}"
        )
    text = config.get_text_config()
    reason = architecture.refuse(text)
    if reason is not None:
        raise UnsupportedModelError(
            f"This {architecture.name} model cannot be decomposed exactly: {reason}. "
            "Choose another checkpoint of the family."
        )
    return architecture.of(text)


# -- families that facts cannot describe ---------------------------------------------------------------------

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
    """Why facts cannot describe a family, if that is known."""
    for reason, families in UNFIT.items():
        if config.model_type in families:
            return reason
    return "it is an encoder and a decoder, not one causal model" if config.is_encoder_decoder else None


__all__ = [
    "ARCHITECTURES",
    "HOW_TO_ADD",
    "UNFIT",
    "Architecture",
    "Projections",
    "find_architecture",
    "register_architecture",
]
