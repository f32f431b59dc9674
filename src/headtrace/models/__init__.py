"""A Hugging Face causal language model as heads and components: loading, folded weights, recordings."""

from headtrace.models.architectures import ARCHITECTURES, Architecture, register_architecture
from headtrace.models.conformance import Conformance, conformance
from headtrace.models.load import load
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
