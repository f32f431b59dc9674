"""Tiny models whose heads lost a part of their rank, as pruning does it."""

from __future__ import annotations

import torch

import headtrace
from tests.tiny import tiny_hf


def deficient_model(name: str, dtype: torch.dtype = torch.float32, near: float = 0.0) -> headtrace.Model:
    """Two columns of L1H0's W_Q are zero; in W_K of layer 2's first head two are zero, one repeats another.

    ``near`` adds noise of that size to the repeated column, for a head that is almost, not quite, deficient.
    """
    hf = tiny_hf(name, dtype=dtype)
    width = 8
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if name == "gpt2":
            d = hf.config.n_embd
            W_Q = hf.transformer.h[1].attn.c_attn.weight[:, :width]
            W_K = hf.transformer.h[2].attn.c_attn.weight[:, d : d + width]
        else:
            W_Q = hf.model.layers[1].self_attn.q_proj.weight[:width].T
            W_K = hf.model.layers[2].self_attn.k_proj.weight[:width].T
        if near == 0:
            W_Q[:, :2] = 0
            W_K[:, 2:4] = 0
        noise = torch.randn(W_K.shape[0], generator=generator, dtype=torch.float64).to(dtype)
        W_K[:, 5] = 2 * W_K[:, 0] + near * noise
    return headtrace.load(hf)
