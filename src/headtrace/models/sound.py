"""Whether the parameters of a model are what they should be: one kind of number, in one place, all of them finite."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headtrace.errors import InputError
from headtrace.models.placement import is_spread, values_of

Parts = TypeVar("Parts", bound=Any)
HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)


def raised(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed with: float32 for half precision, itself otherwise.

    >>> raised(torch.bfloat16), raised(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def raised_parts(parts: Parts) -> Parts:
    """A dataclass of weights with every tensor raised; the weights themselves where there is nothing to raise."""
    tensors = {f.name: value for f in fields(parts) if isinstance(value := getattr(parts, f.name), Tensor)}
    return replace(parts, **{name: tensor.to(raised(tensor.dtype)) for name, tensor in tensors.items()})


@torch.no_grad()
def check_parameters(hf: nn.Module) -> None:
    """InputError that names the first parameter with a wrong type or device, or with a number that is not finite."""
    first: Tensor | None = None
    spread = is_spread(hf)
    for name, parameter in hf.named_parameters():
        first = parameter if first is None else first
        values = values_of(hf, name, parameter)
        if parameter.dtype not in DTYPES:
            raise InputError(
                f"The parameter {name!r} is in {_plain(parameter.dtype)}; expected {', '.join(map(_plain, DTYPES))}. "
                "Call model.float() first, or let headtrace.load read it with dtype='float32'."
            )
        if parameter.dtype != first.dtype or (parameter.device != first.device and not spread):
            raise InputError(
                f"The parameter {name!r} is in {_plain(parameter.dtype)} on {str(parameter.device)!r}, others are in "
                f"{_plain(first.dtype)} on {str(first.device)!r}. Convert or move the whole model first: model.to(...)."
            )
        _check_finite(name, values)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_finite(name: str, parameter: Tensor) -> None:
    # A sum is finite only if all its terms are, and costs a tenth of looking at each; it may overflow, so look then.
    if bool(torch.isfinite(parameter.sum())):
        return
    wrong = ~torch.isfinite(parameter)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InputError(
            f"The parameter {name!r} is not finite: {int(wrong.sum())} of {parameter.numel()} numbers are NaN or "
            f"infinite, the first at {place}. Nothing that such a model computes can be trusted: fetch or save it anew."
        )
