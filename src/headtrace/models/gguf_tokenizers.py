"""What a GGUF file says of its tokenizer, and transformers' reader of such files leaves out.

The start token is part of a model's input: Gemma without ``<bos>`` answers something else. A GGUF file says whether one
comes first (``tokenizer.ggml.add_bos_token``); files that do not say it follow llama.cpp, by the kind of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import processors

STARTS_BY_KIND = {"llama": True, "gpt2": False, "bert": True, "t5": False}
"""``tokenizer.ggml.model`` -> whether llama.cpp puts a start token in front where the file does not say."""
WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""``tokenizer.ggml.pre`` of byte-level tokenizers that start with a token by default, and that take a word which is in
their vocabulary whole, whatever their merges make of it."""


def follow_file(tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """Set up a tokenizer that transformers made of a GGUF file: its start and end tokens, and words taken whole.

    Tokens at the end are set as the file has them; headtrace leaves off what a tokenizer puts behind a prompt.
    """
    backend = tokenizer.backend_tokenizer
    kind, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in WHOLE_WORDS:
        backend.model.ignore_merges = True
    start = _said(facts, "add_bos_token", STARTS_BY_KIND.get(str(kind), False) or pre in WHOLE_WORDS)
    end = _said(facts, "add_eos_token", kind == "t5")
    before = (
        _token(tokenizer, facts.get("tokenizer.ggml.bos_token_id", tokenizer.bos_token_id)) if start else None
    )
    behind = (
        _token(tokenizer, facts.get("tokenizer.ggml.eos_token_id", tokenizer.eos_token_id)) if end else None
    )
    used = [each for each in (before, behind) if each is not None]
    pieces = [*([before[0]] if before else []), "$A", *([behind[0]] if behind else [])]
    template = processors.TemplateProcessing(single=pieces, pair=[*pieces, "$B"], special_tokens=used)
    byte_level = kind == "gpt2"
    # Offsets of byte-level tokens include the space before a word unless they are trimmed, as GPT-2's are.
    backend.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template]) if byte_level else template
    )
    # transformers writes these into tokenizer_config.json and makes its own template from them when it reads it.
    tokenizer._add_bos_token, tokenizer._add_eos_token = before is not None, behind is not None
    if before is not None:
        tokenizer.bos_token = before[0]


def _said(facts: Mapping[str, Any], key: str, default: bool) -> bool:
    found = facts.get(f"tokenizer.ggml.{key}")
    return default if not isinstance(found, bool) else found


def _token(tokenizer: Any, number: int | None) -> tuple[str, int] | None:
    """A token as a template names it."""
    if number is None or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number)), int(number)
