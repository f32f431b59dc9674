"""What a circuit says of its model while nobody has asked for the hash of its weights.

To hash the weights of a large model takes longer than a trace, and only files and comparisons need it.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from headtrace.circuits import ModelInfo
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.models.checks import WeightsVersion

AT_ONCE = 1 << 30
"""Bytes of weights up to which they are hashed with the trace: about half a second, once."""


class UnhashedModel(ModelInfo):
    """A model whose weights are hashed when a file, a comparison or a copy needs it.

    Until then the model is kept in memory.
    """

    @classmethod
    def of(cls, model: Model) -> UnhashedModel:
        info = cls(model.name, model.revision, model.architecture.model_type)
        vars(info).update(_model=model, _stamp=model.refresh())
        return info

    @property
    def weights_sha256(self) -> str | None:  # type: ignore[override]
        model: Model | None = vars(self).get("_model")
        if model is not None:
            vars(self).update(weights_sha256=_hash(model, vars(self)["_stamp"]), _model=None)
        return vars(self)["weights_sha256"]

    @property
    def stamp(self) -> WeightsVersion | None:
        """The state of the weights that were traced."""
        return vars(self).get("_stamp")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelInfo) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(astuple(self))

    def __reduce__(self) -> Any:
        return ModelInfo, astuple(self)


def _hash(model: Model, stamp: WeightsVersion) -> str:
    if stamp.weights_sha256 is None and stamp is not model.refresh():
        raise InputError(
            f"The weights of {model.name!r} were changed after the circuit was traced, and there is no hash of what "
            "they were. Save a circuit of a large model, or ask for model.weights_sha256, before its weights change."
        )
    return stamp.weights_sha256 or model.weights_sha256


def same_weights(info: ModelInfo, model: Model) -> bool | None:
    """Whether a circuit's model has the weights that this one has now; None where the circuit has no hash of them.

    In the process that traced it, no weight is read for that.
    """
    if isinstance(info, UnhashedModel) and info.stamp is model.refresh():
        return True
    return None if info.weights_sha256 is None else info.weights_sha256 == model.weights_sha256


def model_info(model: Model) -> ModelInfo:
    """What a circuit says of its model, with the hash of its weights if that is known or quickly made."""
    with model.assume_weights_unchanged():
        if model.refresh().weights_sha256 is None:
            size = sum(parameter.numel() * parameter.element_size() for parameter in model.hf.parameters())
            if size > AT_ONCE:
                return UnhashedModel.of(model)
        return ModelInfo(model.name, model.revision, model.architecture.model_type, model.weights_sha256)
