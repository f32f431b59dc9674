"""Traced tiny models, made once per session: an architecture, a precision, its circuit."""

from __future__ import annotations

from functools import cache

import torch

import headtrace
from tests.tiny import prompts, tiny_model, top_two


@cache
def traced(name: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A tiny model and the circuit of one prompt; both are only read by tests. A low threshold makes it rich."""
    model = tiny_model(name, seed, dtype)
    ids = prompts(seed)[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model, tau=0.08, max_firings=None).trace(ids, answer, wrong, root="linear")
    return model, circuit
