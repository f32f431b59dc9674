"""Channels: the SVD of a head's query-key form, what it says about one firing, sparsity and its controls."""

from headtrace.channels.decomposition import ChannelTerm, Decomposition, decompose, decompose_all
from headtrace.channels.on_demand import ModelChannels, model_channels
from headtrace.channels.sparsity import (
    RotationControl,
    rotation_control,
    signal_set,
)
from headtrace.channels.svd import (
    HeadChannels,
    HeadSVD,
    condition_numbers,
    decompose_model,
    layer_svd,
    svd_heads,
)
from headtrace.channels.terms import FiringTerms, firing_places, terms_of
from headtrace.sparseness import n_recon, sparseness

__all__ = [
    "ChannelTerm",
    "Decomposition",
    "FiringTerms",
    "HeadChannels",
    "HeadSVD",
    "ModelChannels",
    "RotationControl",
    "condition_numbers",
    "decompose",
    "decompose_all",
    "decompose_model",
    "firing_places",
    "layer_svd",
    "model_channels",
    "n_recon",
    "rotation_control",
    "signal_set",
    "sparseness",
    "svd_heads",
    "terms_of",
]
