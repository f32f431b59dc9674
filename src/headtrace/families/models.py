"""Circuits of different models do not mix: their heads and channels have nothing to do with each other."""

from __future__ import annotations

from collections.abc import Sequence

from headtrace.circuits.parts import ModelInfo
from headtrace.errors import InputError


def same_model(a: ModelInfo, b: ModelInfo) -> bool:
    """By the hash of their weights; where a file does not have one, by name and revision.

    >>> same_model(ModelInfo("here", weights_sha256="ab"), ModelInfo("there", weights_sha256="ab"))
    True
    """
    if a.weights_sha256 is not None and b.weights_sha256 is not None:
        return a.weights_sha256 == b.weights_sha256
    return (a.name, a.revision) == (b.name, b.revision)


def described(model: ModelInfo) -> str:
    """A model in an error: its name and the hash of its weights."""
    revision = "" if model.revision is None else f" at {model.revision}"
    hashed = "weights without a hash" if model.weights_sha256 is None else f"weights {model.weights_sha256}"
    return f"{model.name!r}{revision} ({hashed})"


def require_one_model(models: Sequence[ModelInfo], what: str = "Circuits") -> None:
    """Refuse circuits of two models, naming both by their hashes."""
    for other in models[1:]:
        if not same_model(models[0], other):
            raise InputError(
                f"{what} of different models cannot be compared: {described(models[0])} and {described(other)}. Their "
                "heads and channels have nothing to do with each other; give circuits of one model."
            )
