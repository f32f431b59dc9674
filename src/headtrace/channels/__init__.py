"""Channels: the SVD of a head's query-key form, what it says about one firing, sparsity and its controls."""

from headtrace.channels.svd import (
    HeadSVD,
    ModelChannels,
    condition_numbers,
    decompose_model,
    layer_svd,
    model_channels,
    svd_heads,
)

__all__ = [
    "HeadSVD",
    "ModelChannels",
    "condition_numbers",
    "decompose_model",
    "layer_svd",
    "model_channels",
    "svd_heads",
]
