"""The built-in model: a small GPT-2 that ships with headtrace and knows the tasks.

``folder()`` is a Hugging Face folder with its weights and tokenizer. `docs/studies/builtin_model` made it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """Where the built-in model is: config.json, model.safetensors, tokenizer.json.

    >>> sorted(path.name for path in folder().glob("*.json"))
    ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    return Path(__file__).parent
