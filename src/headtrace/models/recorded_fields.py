"""The tensors of a recording, as attributes that know their axes and say so where they were not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from headtrace.errors import InputError
from headtrace.models.patterns import n_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headtrace.models.architectures import Architecture
    from headtrace.models.model import Model
    from headtrace.models.recording import Recording


class Recorded:
    """A recorded tensor: an attribute of ``Recording`` that says so if it was not kept."""

    name: str

    def __init__(self, axes: str, *, by_default: bool = True, dtype: torch.dtype | None = None) -> None:
        self.axes = tuple(axes.split())
        self.by_default, self.dtype = by_default, dtype

    def __set_name__(self, owner: type[Recording], name: str) -> None:
        self.name = name

    def made_by(self, architecture: Architecture) -> bool:
        """Whether models of this architecture have such a thing at all."""
        return True

    @overload
    def __get__(self, recording: None, owner: type) -> Recorded: ...
    @overload
    def __get__(self, recording: Recording, owner: type) -> Tensor: ...
    def __get__(self, recording: Recording | None, owner: type) -> Recorded | Tensor:
        return self if recording is None else self._read(recording)

    def _read(self, recording: Recording) -> Tensor:
        try:
            return recording.tensors[self.name]
        except KeyError:
            if self.name == "patterns" and "log_normalisers" in recording.tensors:
                raise InputError(
                    "The patterns of this recording were not kept: they are computed again where they are read "
                    "(recording.pattern(layer), recording.attention). To keep them: model.record(prompt, "
                    'patterns="keep").'
                ) from None
            raise InputError(
                f"This recording was made without {self.name!r}. Keep it: "
                f"model.record(prompt, keep=[..., {self.name!r}]), or leave keep out."
            ) from None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes)

    def cut(self, tensor: Tensor, prompt: int, length: int) -> Tensor:
        """One prompt of a batch, without padding (a view: nothing is copied)."""
        of_axis = {
            "batch": slice(prompt, prompt + 1),
            **dict.fromkeys(("token", "dest", "src"), slice(length)),
            "block": slice(n_blocks(length)),
        }
        return tensor[tuple(of_axis.get(axis, slice(None)) for axis in self.axes)]


class RecordedIf(Recorded):
    """A recorded tensor that only some architectures have; None for the others."""

    def __init__(self, axes: str, *, when: Callable[[Architecture], bool], by_default: bool = True) -> None:
        super().__init__(axes, by_default=by_default)
        self.when = when

    def made_by(self, architecture: Architecture) -> bool:
        return self.when(architecture)

    if TYPE_CHECKING:

        @overload
        def __get__(self, recording: None, owner: type) -> Recorded: ...
        @overload
        def __get__(self, recording: Recording, owner: type) -> Tensor | None: ...
        def __get__(self, recording: Recording | None, owner: type) -> Any: ...  # type: ignore[override]

    def _read(self, recording: Recording) -> Any:
        return super()._read(recording) if self.when(recording.model.architecture) else None


def axis_sizes(model: Model, batch: int, length: int, kept: int) -> dict[str, int]:
    """The size of every axis that a recorded tensor can have."""
    return {
        "layer": model.n_layers,
        "layer_and_final": model.n_layers + 1,
        "batch": batch,
        **dict.fromkeys(("token", "dest", "src"), length),
        "block": n_blocks(length),
        "kept": kept,
        "head": model.n_heads,
        "kv_head": model.n_kv_heads,
        "d_model": model.d_model,
        "d_head": model.d_head,
        "vocab": model.d_output,
    }


def choose(fields: Mapping[str, Recorded], keep: Iterable[str] | None, model: Model) -> dict[str, Recorded]:
    """The tensors to record: those asked for, or the usual ones; what the architecture does not have is left out."""
    if keep is not None:
        keep = [keep] if isinstance(keep, str) else list(keep)
        unknown = [name for name in keep if name not in fields]
        if unknown:
            raise InputError(f"keep={unknown[0]!r}: a recording has {', '.join(fields)}.")
    if keep is not None and "residuals" in keep:
        keep = [*keep, "position_embedding"]  # the first residual is the sum of two components with it
    wanted = [n for n, f in fields.items() if (f.by_default if keep is None else n in keep)]
    return {name: fields[name] for name in wanted if fields[name].made_by(model.architecture)}
