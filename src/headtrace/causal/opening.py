"""Opening a circuit on a model: whether it is the model that was traced, and has all that the circuit names.

>>> import headtrace
>>> from headtrace.circuits.describe import example
>>> require_places(example(), headtrace.load("builtin"))
Traceback (most recent call last):
headtrace.errors.InputError: prompt.token_ids[1]: expected 0 to 484 (token ids of 'builtin'), got 5390
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.models.computation import difference
from headtrace.models.devices import available_bytes
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
    ids = circuit.prompt.token_ids
    if not ids:
        raise InputError("prompt.token_ids: expected at least one token, got an empty list")
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
        if signal.layer >= below:
            fail(f"{inner}.layer", f"a layer below {below}, that of {node.name!r}", signal.layer)
        _require_below(f"{inner}.head", signal.head, model.n_heads, "heads of a layer", model)
        _require_each(f"{inner}.channels", signal.channels, model.d_head, "channels of a head", model)
