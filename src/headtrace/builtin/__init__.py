"""The built-in model: a small GPT-2 that ships with headtrace and knows the tasks.

``folder()`` is a Hugging Face folder with its weights and tokenizer; ``text`` generates what it was trained
on, ``train`` is the script that made it (``python -m headtrace.builtin.train OUT``).
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """Where the built-in model is: config.json, model.safetensors, tokenizer.json.

    >>> AutoModelForCausalLM.from_pretrained(folder())
    """
    return Path(__file__).parent
