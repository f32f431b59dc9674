"""Whether the parameters of a model are what they should be: one kind of number, in one place, all of them finite."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headtrace.errors import IdentityError, InputError
from headtrace.models.devices import (
    DTYPES,
    is_spread,
    own_parameters,
    set_aside,
    set_aside_in_memory,
    values_of,
)

if TYPE_CHECKING:
    from headtrace.models.recording import Recording


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


SIZE = 24
"""Rows and columns of what is computed with: as many terms has each sum."""
ROUNDINGS = {torch.bfloat16: 8, torch.float16: 8}
"""How many roundings may be seen in a result: in half precision those of what comes out (sums are made in float32),
else four for each term of a sum."""

Operation = Callable[[Tensor, Tensor], Tensor]


def _hidden(x: Tensor) -> Tensor:
    """Scores with later keys hidden, as attention has them."""
    later = torch.ones(SIZE, SIZE, dtype=torch.bool, device=x.device).triu(1)
    return (8 * x).masked_fill(later, -torch.inf)


def _put(x: Tensor, y: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    rows = torch.arange(0, SIZE, 3, device=x.device)
    found[rows, rows.flip(0)] = y[rows, 1]
    return found.index_add(0, rows, x[rows])


OPERATIONS: dict[str, Operation] = {
    "matrix products": lambda x, y: x @ y,
    "products of turned matrices": lambda x, y: x.mT @ y.mT[:, ::2],
    "batches of matrix products": lambda x, y: x.reshape(4, -1, SIZE) @ y,
    "sums of products (einsum)": lambda x, y: torch.einsum(
        "bhtr,hrd->btd", x.reshape(2, 3, 4, SIZE), y.reshape(3, SIZE, 8)
    ),
    "softmax": lambda x, _: _hidden(x).softmax(-1),
    "log-sum-exp": lambda x, _: _hidden(x).logsumexp(-1),
    "norms": lambda x, y: torch.stack((x.var(-1, unbiased=False).sqrt(), y.square().mean(-1).rsqrt())),
    "layer norm": lambda x, y: functional.layer_norm(x, (SIZE,), y[0], y[1]),
    "sums": lambda x, y: torch.stack((x.sum(-1), y.mT.sum(-1), x.amax(0), y.norm(dim=0))),
    "sums from the first on (cumsum)": lambda x, y: x.cumsum(-1) + y.mT.cumsum(0),
    "activations": lambda x, y: torch.cat(
        (x.tanh(), functional.silu(y), functional.gelu(x), y.relu(), x.exp())
    ),
    "rotations": lambda x, y: (
        torch.cat((-x[:, SIZE // 2 :], x[:, : SIZE // 2]), dim=-1) * y.cos() + x * y.sin()
    ),
    "embeddings": lambda x, y: functional.embedding(x.argsort(-1)[:2], y),
    "choosing by index": lambda x, y: x.gather(1, y.argsort(-1)) + x[y[0].argsort(), y[1].argsort()],
    "writing by index": _put,
    "changes in place": lambda x, y: x.clone().mT.add_(y).mul_(2).sub_(x),
    "sorting": lambda x, y: torch.cat(
        (x.sort(dim=-1, descending=True, stable=True).values, y.topk(20).values), dim=-1
    ),
    "conditions": lambda x, y: torch.where(x > y, x, y).masked_fill(y.isnan() | (x < -2), 0.0),
}
"""What is tried, by the name in the message."""


def check_backends(own: torch.dtype, places: Iterable[torch.device]) -> None:
    """Try the devices of a model, in its own dtype and in float32 at least; each once in a process.

    The CPU is what they are held against.
    """
    for device in dict.fromkeys(place for place in places if place.type != "cpu"):
        for dtype in dict.fromkeys((own, torch.promote_types(own, torch.float32))):
            check_backend(device, dtype)


def check_backend(device: torch.device, dtype: torch.dtype) -> None:
    """IdentityError that names the device and the first operation that it gets wrong.

    >>> check_backend(torch.device("cpu"), torch.float32)
    """
    wrong = _first_wrong(device, dtype)
    if wrong is not None:
        plain = str(dtype).removeprefix("torch.")
        raise IdentityError(
            f"The device {str(device)!r} computes {wrong[0]} wrongly in {plain}: relative error {wrong[1]:.1e} against "
            f"the host (allowed {wrong[2]:.0e}), so nothing that a model shows there can be trusted. Use device='cpu', "
            "another version of PyTorch or of the driver, or, if products were made less exact on purpose, "
            "torch.set_float32_matmul_precision('highest')."
        )


@cache
def _first_wrong(device: torch.device, dtype: torch.dtype) -> tuple[str, float, float] | None:
    """The first operation with too large an error: its name, the error and what is allowed."""
    allowed = ROUNDINGS.get(dtype, 4 * SIZE) * torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    # Numbers that the dtype has, so that what differs afterwards was computed, not rounded before.
    drawn = torch.randn(2, SIZE, SIZE, generator=generator).to(dtype)
    with torch.inference_mode():
        there = drawn.to(device)
        for name, operation in OPERATIONS.items():
            expected = operation(*drawn.double())
            found = operation(*there).cpu().double()
            error = (found - expected).abs().max() / expected.abs().max()
            if not float(error) <= allowed:
                return name, float(error), allowed
    return None


SAMPLES = 32
"""Numbers that are compared per parameter."""
GOLDEN = 0.618
_edits = attrgetter("_version")


class WeightsVersion:
    """Stands for one state of a model's weights, without holding them: another object after every change."""

    weights_sha256: str | None = None
    """Their hash, once somebody has asked for it."""


class Watcher:
    """What a model's weights look like at one moment, to be held against what they look like later."""

    def __init__(self, hf: nn.Module) -> None:
        # Dictionaries of the modules themselves: they show what is added, replaced or taken away.
        # Parameters of modules whose weights were set aside come and go with every pass: those are watched instead.
        self._aside = [module for module in hf.modules() if set_aside(module) is not None]
        ignored = {id(vars(module)["_parameters"]) for module in self._aside}
        self._dicts: list[dict[str, Any]] = [
            own
            for module in hf.modules()
            for own in (vars(module)["_modules"], vars(module)["_parameters"])
            if id(own) not in ignored
        ]
        self._parts = list(self._now())
        parameters = list({id(part): part for part in self._parts if isinstance(part, Tensor)}.values())
        self._parameters: list[Tensor] = parameters
        self._counted = [
            p for p in self._parameters if not p.is_inference()
        ]  # those made for inference have no count
        # They share memory with the parameters, whose addresses cannot be given to others as long as these are held.
        self._samples = [_sample(p) for p in self._parameters if p.device.type == "cpu"]
        self._seen = self._look()

    def holds(self) -> bool:
        """Whether nothing that can be seen has changed."""
        now = list(self._now())
        return len(now) == len(self._parts) and all(map(is_, now, self._parts)) and self._look() == self._seen

    def _now(self) -> Iterator[Any]:
        yield from chain.from_iterable(map(dict.values, self._dicts))
        yield from chain.from_iterable(set_aside_in_memory(module).values() for module in self._aside)

    def _look(self) -> tuple[list[int], list[int], bytes]:
        addresses = list(map(Tensor.data_ptr, self._parameters))
        return list(map(_edits, self._counted)), addresses, b"".join(map(np.ndarray.tobytes, self._samples))


def require_same_weights(recording: Recording) -> None:
    """A recording belongs to the weights it was made with: with others, nothing would add up."""
    if recording.weights_version is not recording.model.refresh():
        raise InputError(
            f"The weights of {recording.model.name!r} were changed after this recording was made, so the two do not "
            "belong together. Record again: model.record(prompt)."
        )


def _sample(parameter: Tensor) -> np.ndarray:
    """Some of a parameter's numbers, spread over rows and columns alike, as a view."""
    held = parameter.detach()
    # NumPy knows no bfloat16: its bits will do.
    values = (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()
    if not values.flags.c_contiguous:
        return values[tuple(slice(None, None, max(1, size // 6)) for size in values.shape)]
    row = values.shape[-1] if values.ndim > 1 else 1
    # Each step goes some rows down and a golden section of a row across, so that no column is always the one.
    step = values.size // SAMPLES // row * row + (round(GOLDEN * row) if row > 1 else 0)
    return values.reshape(-1)[:: max(1, step)][: 2 * SAMPLES]


BLOCK = 1 << 24
"""Numbers that are converted at a time, so that no second copy of a large matrix is made."""


@torch.no_grad()
def weights_sha256(hf: nn.Module) -> str:
    """Names, shapes and float32 values of all parameters: the same whatever the dtype they are kept in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(own_parameters(hf)):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        for block in _blocks(values_of(hf, name, parameter)):
            digest.update(block.float().cpu().numpy().data)
    return digest.hexdigest()


def _blocks(parameter: Tensor) -> Iterable[Tensor]:
    return parameter.detach().contiguous().flatten().split(BLOCK)
