"""Whether the parameters of a model are what they should be: one kind of number, in one place, all of them finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtrace.errors import InputError


@torch.no_grad()
def check_parameters(hf: nn.Module) -> None:
    """InputError that names the first parameter with a wrong type or device, or with a number that is not finite."""
    first: Tensor | None = None
    for name, parameter in hf.named_parameters():
        first = parameter if first is None else first
        if parameter.device.type == "meta":
            raise InputError(
                f"The parameter {name!r} has no values (it is on the device 'meta'). Load its weights first."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"The parameter {name!r} is in {_plain(parameter.dtype)}; decompositions are exact in float32 and "
                "float64 only. Call model.float() first, or let headtrace.load read it with dtype='float32'."
            )
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise InputError(
                f"The parameter {name!r} is in {_plain(parameter.dtype)} on {str(parameter.device)!r}, others are in "
                f"{_plain(first.dtype)} on {str(first.device)!r}. Convert or move the whole model first: model.to(...)."
            )
        _check_finite(name, parameter)


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
