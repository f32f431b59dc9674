"""A Hugging Face causal language model as heads and components: loading, folded weights, recordings.

Names are imported on first use: the tables of architectures are read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.lazy import lazy_names
from headtrace.models.architectures import ARCHITECTURES, Architecture, register_architecture

if TYPE_CHECKING:
    from headtrace.models.conforming import Conformance, conformance
    from headtrace.models.loading import load
    from headtrace.models.model import Model
    from headtrace.models.observer import Observer
    from headtrace.models.recording import Recording

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Conformance",
    "Model",
    "Observer",
    "Recording",
    "conformance",
    "load",
    "register_architecture",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Conformance": "conforming",
        "Model": "model",
        "Observer": "observer",
        "Recording": "recording",
        "conformance": "conforming",
        "load": "loading",
    },
)
