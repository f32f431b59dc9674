"""How far two correct computations of the same sum may differ.

Sums come out differently in the last bits on another CPU, with another number of threads or another alignment. A sum
of ``terms`` numbers of size ``size`` is then off by at most ``eps * terms * size`` (Higham, Accuracy and Stability of
Numerical Algorithms, section 4.2); a chain of layers adds the bounds of its parts.
"""

from __future__ import annotations

import torch


def rounding(dtype: torch.dtype, terms: int, size: float = 1.0) -> float:
    """The bound for one sum, or for a chain of sums with so many terms in all."""
    return torch.finfo(dtype).eps * terms * size


def forward_terms(model) -> int:
    """Terms that add up along one path through a model: per layer what is read, mixed, written, and hidden units."""
    hidden = getattr(model.hf.config, "intermediate_size", None) or 4 * model.d_model
    return model.n_layers * (2 * model.d_model + model.d_head + hidden) + model.d_model
