"""Opening a circuit on a model: whether it is the model that was traced, has all that the circuit names, and how far
two correct computations of the same number may lie apart.

>>> import headtrace
>>> from headtrace.circuits.describe import example
>>> require_places(example(), headtrace.load("builtin"))
Traceback (most recent call last):
headtrace.errors.InputError: prompt.token_ids[1]: expected 0 to 484 (token ids of 'builtin'), got 5390

A forward pass adds up many numbers, and each sum is rounded. Rounding goes up as often as down, so the errors of n sums
grow like the square root of n (Higham and Mary, 2019, on probabilistic rounding error analysis): a number of size s
computed with n of them may differ by ``2 eps sqrt(n) s`` (eps / 2 is one rounding, so that is four of their standard
deviations at most) on another CPU, with another number of threads or in another order.

The precision is that of the model which is run. What a file says of its own precision changes nothing about it: a file
of coarser numbers cannot be confirmed to the model's rounding, and gets a verdict that says so. Nothing is finer than
the channels themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headtrace.channels.svd import RECONSTRUCTION_TOLERANCE
from headtrace.circuits.checks import require_token_ids
from headtrace.errors import InputError
from headtrace.models.devices import DTYPES, HALF, available_bytes
from headtrace.models.integrity import difference
from headtrace.validation import fail

if TYPE_CHECKING:
    from headtrace.circuits import Circuit, Node
    from headtrace.models import Model, Recording


PATHS = 5
"""How many tensors as large as the path of integrated gradients exist at a time."""


def open_circuit(circuit: Circuit, model: Model) -> Recording:
    """Record a circuit's prompt again, after making sure that the model is the one that was traced.

    Another model's circuit is refused: its numbers say nothing about this one, right or wrong.
    """
    require_own_model(circuit, model)
    require_places(circuit, model)
    return as_traced(circuit, model.record(list(circuit.prompt.token_ids)))


def as_traced(circuit: Circuit, recording: Recording) -> Recording:
    """A recording with the components that a circuit was traced with: in files of earlier versions what positions add
    belongs to the embedding."""
    apart = (circuit.method.settings or {}).get("positions") == "apart"
    apart = apart or any(node.kind == "position" for node in circuit.nodes)
    return recording if apart else recording.with_positions_joined()


def require_own_model(circuit: Circuit, model: Model) -> None:
    """Raise ``InputError`` if a circuit was traced on another model; one without a hash is taken on trust."""
    other = difference(circuit.model, model)
    if other is not None:
        raise InputError(
            f"The circuit was traced on another model than {model.name!r}: {circuit.model.name!r} has {other}. A "
            "circuit can only be tested on its own model."
        )


def text_as_ids(model: Model, text: str) -> dict[bool | None, list[int]]:
    """Token ids of a text by ``bos``: the tokenizer's own choice, with a beginning-of-sequence token, and without.

    Readings that the tokenizer does not have (no such token, words outside the vocabulary) are left out.
    """
    found: dict[bool | None, list[int]] = {}
    for bos in (None, True, False):
        with suppress(InputError):
            found[bos] = model.to_ids(text, bos=bos)
    return found


def require_places(circuit: Circuit, model: Model) -> None:
    """Tokens, layers, heads and channels exist in the model; the error names the field that says otherwise."""
    require_token_ids(circuit)
    ids = circuit.prompt.token_ids
    if model.max_positions is not None and len(ids) > model.max_positions:
        fail("prompt.token_ids", f"at most {model.max_positions} (the context of {model.name!r})", len(ids))
    _require_tokens("prompt.token_ids", ids, model)
    circuit.root.require_in(model, len(ids))
    _require_steps(circuit, model)
    for i, node in enumerate(circuit.nodes):
        _require_node(f"nodes[{i}]", node, model)
    for i, edge in enumerate(circuit.edges):
        _require_each(f"edges[{i}].channels", edge.channels or (), model.d_head, "channels of a head", model)


def _require_steps(circuit: Circuit, model: Model) -> None:
    """Integrated gradients hold every step of their path at once: over the vocabulary for a likelihood."""
    steps = circuit.method.ig_steps or 0
    width = circuit.root.path_width(model, len(circuit.prompt.token_ids))
    most = available_bytes() // (PATHS * 8 * width)
    if steps >= most:
        fail("method.ig_steps", f"fewer than {most:,} steps, for which there is memory", steps)


def _require_below(path: str, value: int | None, end: int, what: str, model: Model) -> None:
    if value is not None and not 0 <= value < end:
        fail(path, f"0 to {end - 1} ({what} of {model.name!r})", value)


def _require_each(path: str, values: Iterable[int], end: int, what: str, model: Model) -> None:
    for i, value in enumerate(values):
        _require_below(f"{path}[{i}]", value, end, what, model)


def _require_tokens(path: str, ids: Iterable[int], model: Model) -> None:
    _require_each(path, ids, model.d_vocab, "token ids", model)


def _require_node(path: str, node: Node, model: Model) -> None:
    _require_below(f"{path}.layer", node.layer, model.n_layers, "layers", model)
    _require_below(f"{path}.head", node.head, model.n_heads, "heads of a layer", model)
    for i, signal in enumerate(node.elsewhere or ()):
        inner = f"{path}.elsewhere[{i}]"
        below = node.layer or 0
        if signal.layer is not None and signal.layer >= below:
            fail(f"{inner}.layer", f"a layer below {below}, that of {node.name!r}", signal.layer)
        _require_below(f"{inner}.head", signal.head, model.n_heads, "heads of a layer", model)
        _require_each(f"{inner}.channels", signal.channels, model.d_head, "channels of a head", model)


WRITTEN = torch.finfo(torch.float32).eps
"""For each number that follows from others in the file, whatever the model."""
ROUNDED_PER_LAYER = 10
"""Tensors that a layer rounds to half precision: norms, queries, keys, values, scores, mixture, writes, residual.
Inside a product, half precision is added up in float32."""


@dataclass(frozen=True)
class Tolerance:
    """How far the numbers of a file may differ from the model's, and how that was derived."""

    precision: str
    """The precision that the model runs in."""
    terms: int
    """Rounded sums along one path through the model."""
    relative: float
    """``2 eps sqrt(terms)``: allowed for a number of size one."""

    @classmethod
    def of(cls, model: Model, precision: str | None = None) -> Tolerance:
        """The tolerance of a model as it runs, or as it would in another precision."""
        dtype = model.hf.dtype
        if precision is not None:
            dtype = next(each for each in DTYPES if str(each) == f"torch.{precision}")
        terms = rounded_sums(model, dtype)
        relative = max(2 * torch.finfo(dtype).eps * math.sqrt(terms), RECONSTRUCTION_TOLERANCE)
        return cls(str(dtype).removeprefix("torch."), terms, relative)

    def number(self, size: float) -> float:
        """For a number in a computation whose largest numbers have this size."""
        return self.relative * max(1.0, size)

    def attention(self, size: float) -> float:
        """For attention whose logits (and what is removed from them) have this size.

        ``dp = p (1 - p) d(logit - other logits)``, so no change of logits by x moves attention by more than x / 2.
        """
        return min(1.0, self.number(size) / 2)

    def __str__(self) -> str:
        why = f"2 x eps of {self.precision} x sqrt of {self.terms:,} rounded sums"
        if self.relative <= RECONSTRUCTION_TOLERANCE:
            why = f"{self.precision}; the exactness of the channels"
        return f"{self.relative:.1e} x the size of what is added up ({why})"


def rounded_sums(model: Model, precision: torch.dtype) -> int:
    """Sums that are rounded along one path: per layer what is read, mixed and written, and the hidden units."""
    if precision in HALF:
        return ROUNDED_PER_LAYER * model.n_layers
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    return model.n_layers * (2 * model.d_model + model.d_head + hidden) + model.d_model
