"""A Hugging Face causal language model as heads and components: loading, folded weights, recordings."""

from headtrace.models.architectures import ARCHITECTURES, Architecture, register_architecture
from headtrace.models.load import load
from headtrace.models.model import Model
from headtrace.models.observer import Observer
from headtrace.models.recording import Recording

__all__ = ["ARCHITECTURES", "Architecture", "Model", "Observer", "Recording", "load", "register_architecture"]
