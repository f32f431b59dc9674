"""Whether a device computes what it should: each kind of operation that headtrace relies on, held against the host.

The identities of a recording compare a device with itself: a softmax that is wrong in the same way each time passes
them. So before a model is used on a device, a few numbers go through every such operation there, and through the same
one on the host in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from headtrace.errors import IdentityError

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
