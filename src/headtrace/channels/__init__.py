"""Channels: the SVD of a head's query-key form, what it says about one firing, sparsity and its controls."""

from headtrace.channels.sparsity import (
    RotationControl,
    rotation_control,
    signal_set,
)
from headtrace.channels.svd import (
    HeadChannels,
    HeadSVD,
    ModelChannels,
    condition_numbers,
    decompose_model,
    layer_svd,
    model_channels,
    svd_heads,
)
from headtrace.channels.terms import (
    ChannelTerm,
    Decomposition,
    FiringTerms,
    decompose,
    decompose_all,
    firing_places,
    terms_of,
)
from headtrace.measures import n_recon, sparseness

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
