"""What a circuit is made of: model, prompt, root, method, nodes and edges, each a frozen dataclass.

Positions are integers; token text is a label, never a key. Everything here is plain Python data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "headtrace.circuit/1"
Kind = Literal["head", "mlp", "embedding", "attention_bias", "offset", "root"]
Side = Literal["query", "key", "root"]
KINDS: tuple[Kind, ...] = ("root", "head", "mlp", "embedding", "attention_bias", "offset")
SIDES: tuple[Side, ...] = ("query", "key", "root")


@dataclass(frozen=True)
class ModelInfo:
    """The model that was traced, and the hash that tells it from every other."""

    name: str
    revision: str | None = None
    architecture: str | None = None
    weights_sha256: str | None = None


@dataclass(frozen=True)
class Prompt:
    """The prompt: its text (``None`` for bare token ids), its token ids, and how each token reads."""

    text: str | None
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Root:
    """What is being explained: an answer (against a wrong one), a distribution, or a direction."""

    kind: Literal["linear", "probability", "direction"]
    answer: tuple[int, ...] = ()
    wrong: tuple[int, ...] | None = None
    value: float | None = None
    """The whole quantity: a logit difference, a log-likelihood or a projection."""
    position: int | None = None
    layer: int | None = None
    """Of a direction: the layer at whose input it is read."""
    support: tuple[int, ...] | None = None
    """Of a probability: the token ids whose distribution is explained."""
    answer_tokens: tuple[str, ...] | None = None
    wrong_tokens: tuple[str, ...] | None = None
    label: str | None = None


@dataclass(frozen=True)
class Method:
    """How the circuit was found."""

    name: str = "acc++"
    tau: float | str | None = None
    """The threshold: a number, or the rule in words where it depends on the firing."""
    ig_steps: int | None = None
    version: str | None = None
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    """Further settings, such as the budget: names to numbers, strings, booleans or null."""


@dataclass(frozen=True)
class Elsewhere:
    """A key-side signal that a head wrote only at other keys than the firing's source.

    What the head read from ``src`` comes after the firing's own source, so no firing behind it can be
    followed; removing it raises the competing keys. It belongs to the claim, not to the graph.
    """

    layer: int
    head: int
    src: int
    channels: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Node:
    """A component at its place.

    A head sits at the position it writes to (``dest``) and reads one source (``src``). What does not apply is
    ``None``: an mlp and an attention bias have a layer and a position, an embedding a position only, an
    offset the layer and head whose bias it is and the position where it sits, the root nothing.
    """

    id: int
    kind: Kind
    layer: int | None = None
    head: int | None = None
    dest: int | None = None
    src: int | None = None
    attention: float | None = None
    influence: float | None = None
    expanded: bool = False
    explained: bool = True
    predicted: Mapping[str, float | None] | None = field(default=None, hash=False)
    """Per side, the attention that the trace predicts when the selected signals of that side are removed."""
    threshold: float | None = None
    label: str | None = None
    elsewhere: tuple[Elsewhere, ...] | None = None
    """Key-side signals of this firing that act on competing keys only."""

    @property
    def name(self) -> str:
        """The node in one word: ``L9H6 14->3``, ``MLP 5 @13``, ``Embedding @2``.

        >>> Node(1, "head", layer=9, head=6, dest=14, src=3).name
        'L9H6 14->3'
        """
        if self.kind == "head":
            return f"L{self.layer}H{self.head} {self.dest}->{self.src}"
        if self.kind == "mlp":
            return f"MLP {self.layer} @{self.dest}"
        if self.kind == "embedding":
            return f"Embedding @{self.dest}"
        if self.kind == "attention_bias":
            return f"Attention bias {self.layer} @{self.dest}"
        if self.kind == "offset":
            return f"Offset L{self.layer}H{self.head} @{self.dest}"
        return "Root"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Edge:
    """A signal: what ``source`` writes into ``channels`` of ``target``, on one side.

    ``weight`` is the attention that the signal's removal takes away; on edges to the root it is the
    contribution to what the root measures. ``effect`` holds measured effects, once the circuit is verified.
    """

    source: int
    target: int
    side: Side
    weight: float
    channels: tuple[int, ...] | None = None
    effect: Mapping[str, Any] | None = field(default=None, hash=False)
    description: str | None = None
