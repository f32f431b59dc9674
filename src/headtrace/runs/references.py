"""Published circuits, and how far a network agrees with one: precision, recall and F1, at every threshold.

A reference lists heads, what they do, and which of them feed which. It is JSON, schema ``headtrace.reference/1``; those
of ``references/`` are known by name, and anyone's own loads from a file.

>>> reference = load_reference("gpt2-ioi")
>>> len(reference.heads), reference.groups()["name mover"]
(26, ((9, 6), (9, 9), (10, 0)))
>>> sorted(load_reference("pythia-160m-ioi").groups())
['S-inhibition', 'induction', 'name mover', 'positive copy suppression', 'previous token']

``agreement`` compares heads: those that an edge of the network joins, whatever their roles, against those of the
reference. It compares edges as pairs of heads, whatever the roles and side, against all pairs that the reference's
edges stand for. An edge between two groups of heads stands for many pairs, which its source need not claim one by one;
``links`` therefore counts the reference's own edges of which the network has at least one pair.

By frequency, edges found in a smaller share of prompts are left out; by weight, query and key edges of a smaller mean
weight, and all edges of other sides, whose weights are in another unit.

>>> score(found=10, right=4, of=16)
(0.4, 0.25, 0.3076923076923077)
>>> score(found=0, right=0, of=16)
(None, 0.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
from pydantic import Field

from headtrace.errors import InputError
from headtrace.runs.network import Head, Network
from headtrace.tables import WithTable, frame, paragraph
from headtrace.validation import LARGEST, Index, Text, Words, fail, file_text, parse, read_document, stored
from headtrace.vocabulary import ATTENTION_SIDES, head_name, parse_head

SCHEMA = "headtrace.reference/1"
_FOLDER = files("headtrace.runs") / "references"
Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Threshold = Literal["frequency", "weight"]
SHARES = tuple(step / 20 for step in range(21))
"""From every edge to those of all prompts."""
_MOST = 21
"""How many weights are tried as thresholds."""


@stored
class ReferenceModel:
    """The model that the circuit is of."""

    name: Text
    """The name it is best known by."""
    n_layers: Size
    """How many layers it has."""
    n_heads: Size
    """How many heads a layer has."""
    architecture: Text | None = None
    """The family of architectures, such as `gpt2`."""
    names: Words = ()
    """Other names of the same model."""


@stored
class ReferenceHead:
    """A head of the circuit."""

    layer: Index
    """Its layer."""
    head: Index
    """Its number within the layer."""
    group: Text | None = None
    """What it does, in the words of the source: heads with the same words are a group."""
    dest: Text | None = None
    """The role that it attends from."""
    src: Text | None = None
    """The role that it attends to."""

    def __str__(self) -> str:
        return head_name(self.layer, self.head)


@stored
class ReferenceEdge:
    """Heads that write what other heads read."""

    source: Text
    """A group, or one head as `L9H6`."""
    target: Text
    """A group, or one head."""


@stored
class Reference:
    """A published circuit."""

    name: Text
    """A short name."""
    model: ReferenceModel
    """The model that the circuit is of."""
    heads: Annotated[tuple[ReferenceHead, ...], Field(min_length=1)]
    """Its heads."""
    edges: tuple[ReferenceEdge, ...] = ()
    """Which of them write what others read; without edges, only heads are compared."""
    title: Text | None = None
    """What it is about."""
    source: Text | None = None
    """Where it is published."""
    notes: Text | None = None
    """What else a reader should know."""

    def __post_init__(self) -> None:
        _check(self)

    def __repr__(self) -> str:
        return (
            f"Reference({self.name!r}, {self.model.name!r}, {len(self.heads)} heads, {len(self.edges)} edges)"
        )

    def groups(self) -> dict[str, tuple[Head, ...]]:
        """The heads of each group, in the order of the file; those without one under ``""``."""
        found: dict[str, list[Head]] = {}
        for each in self.heads:
            found.setdefault(each.group or "", []).append((each.layer, each.head))
        return {group: tuple(heads) for group, heads in found.items()}

    def ends(self, name: str) -> tuple[Head, ...]:
        """The heads that an end of an edge stands for."""
        groups = self.groups()
        return groups[name] if name in groups else (parse_head(name),)

    def pairs(self, edge: ReferenceEdge) -> frozenset[tuple[Head, Head]]:
        """The pairs of heads that an edge stands for: the first of each in a lower layer."""
        ends = (self.ends(edge.source), self.ends(edge.target))
        return frozenset((a, b) for a in ends[0] for b in ends[1] if a[0] < b[0])


def reference_names() -> tuple[str, ...]:
    """The references that come with headtrace."""
    names = (path.name for path in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_reference(name: str | Path) -> Reference:
    """A reference by its name, or from a JSON file."""
    if str(name) in reference_names():
        text = (_FOLDER / f"{name}.json").read_text(encoding="utf-8")
    else:
        known = ", ".join(reference_names())
        text = file_text(name, "a reference file", f"Known by name: {known}.")
    try:
        return reference_from_json(parse(text, "a reference file"))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def reference_from_json(data: Any) -> Reference:
    """A reference from the data of its file."""
    return read_document(Reference, data, SCHEMA)


def require_same_model(network: Network, reference: Reference) -> None:
    """Refuse a reference whose model is known to be another one than the network's; both are named."""
    model, theirs = network.model, reference.model
    name = "a model without a name" if model is None else repr(model.name)
    expected = f"{theirs.name!r} ({theirs.n_layers} layers of {theirs.n_heads} heads)"
    problem = ""
    outside = [pair for pair in network.heads() if pair[0] >= theirs.n_layers or pair[1] >= theirs.n_heads]
    if outside:
        problem = f"it has {head_name(*outside[0])}"
    elif model is not None and theirs.architecture and model.architecture not in (None, theirs.architecture):
        problem = f"its architecture is {model.architecture}, not {theirs.architecture}"
    elif model is not None and _known_as_another(model.name, theirs):
        problem = "that name belongs to another model"
    if problem:
        raise InputError(
            f"The reference {reference.name!r} is of {expected}; this network is of {name}: {problem}. Compare a "
            "network with a reference of its own model."
        )


def _known_as_another(name: str, model: ReferenceModel) -> bool:
    from headtrace.models.packages import ALIASES, BUILTIN

    own = {model.name, *model.names}
    own |= {ALIASES[each] for each in own if each in ALIASES}
    return name not in own and name in {BUILTIN, *ALIASES, *ALIASES.values()}


def _check(reference: Reference) -> None:
    """Heads exist in the model and occur once, edges join groups or heads that are listed."""
    model = reference.model
    taken: set[Head] = set()
    for i, head in enumerate(reference.heads):
        if head.layer >= model.n_layers:
            fail(f"heads[{i}].layer", f"a layer below {model.n_layers}, as {model.name!r} has", head.layer)
        if head.head >= model.n_heads:
            fail(f"heads[{i}].head", f"a head below {model.n_heads}, as {model.name!r} has", head.head)
        if (head.layer, head.head) in taken:
            raise InputError(f"heads[{i}]: {head} occurs more than once")
        taken.add((head.layer, head.head))
    named = set(reference.groups()) - {""} | {head_name(*head) for head in taken}
    for i, edge in enumerate(reference.edges):
        for end in ("source", "target"):
            if getattr(edge, end) not in named:
                fail(f"edges[{i}].{end}", "a group of heads, or a head that is listed", getattr(edge, end))
        if not reference.pairs(edge):
            fail(
                f"edges[{i}]",
                "a head of the source in a layer below one of the target",
                f"{edge.source} -> {edge.target}",
            )


# -- agreement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ReferenceAgreement(WithTable):
    """A network against a reference at a sweep of thresholds."""

    reference: Reference
    network: Network
    table: pl.DataFrame
    """One row for each threshold: how many heads and edges are left, how many of them are in the reference, precision,
    recall and F1 of both, and the share of the reference's own edges that are there (``links``)."""

    def __repr__(self) -> str:
        best = max((row["heads_f1"] or 0.0 for row in self.table.rows(named=True)), default=0.0)
        thresholds = f"{self.table.height} thresholds"
        return f"ReferenceAgreement({self.reference.name!r}: best F1 of heads {best:.3f}, {thresholds})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.groups()) + frame(self.table)

    def best(self, by: Threshold = "frequency", what: Literal["heads", "edges"] = "heads") -> dict[str, Any]:
        """The row with the highest F1; of equals, that of the highest threshold."""
        rows = self.table.filter((pl.col("by") == by) & pl.col(f"{what}_f1").is_not_null())
        if rows.is_empty():
            raise InputError(f"The reference {self.reference.name!r} says nothing about {what}.")
        return rows.sort(f"{what}_f1", "threshold", descending=True).row(0, named=True)

    def groups(self, min_frequency: float = 0.0) -> pl.DataFrame:
        """Which heads of each group are in the network, and which are not."""
        there = set(self.network.prune(min_frequency=min_frequency).heads())
        rows = [
            {
                "group": group or "without a group",
                "heads": len(heads),
                "found": sum(head in there for head in heads),
                "missing": [f"L{layer}H{head}" for layer, head in heads if (layer, head) not in there],
            }
            for group, heads in self.reference.groups().items()
        ]
        return pl.DataFrame(rows, schema_overrides={"missing": pl.List(pl.String)})


def agreement(
    network: Network,
    reference: Reference,
    *,
    frequencies: Sequence[float] = SHARES,
    weights: Sequence[float] | None = None,
) -> ReferenceAgreement:
    """Compare a network with a reference of its model; ``weights`` are by default quantiles of those it has."""
    require_same_model(network, reference)
    signals = network.keeping([edge for edge in network.edges if edge.side in ATTENTION_SIDES])
    rows = [_row(network.prune(min_frequency=each), reference, "frequency", each) for each in frequencies]
    tried = _quantiles(signals) if weights is None else weights
    rows += [_row(signals.prune(min_weight=each), reference, "weight", each) for each in tried]
    return ReferenceAgreement(reference, network, pl.DataFrame(rows, schema=_SCHEMA))


_SCHEMA: dict[str, Any] = {
    "by": pl.String,
    "threshold": pl.Float64,
    **{
        f"{what}{each}": pl.Float64 if each in ("_precision", "_recall", "_f1") else pl.Int64
        for what in ("heads", "edges")
        for each in ("", "_right", "_precision", "_recall", "_f1")
    },
    "links": pl.Int64,
    "links_recall": pl.Float64,
}


def _row(network: Network, reference: Reference, by: Threshold, threshold: float) -> dict[str, Any]:
    known: set[Head] = {(each.layer, each.head) for each in reference.heads}
    groups = [reference.pairs(edge) for edge in reference.edges]
    pairs = set(network.head_edges())
    row: dict[str, Any] = {"by": by, "threshold": float(threshold)}
    row |= _scores("heads", set(network.heads()), known)
    row |= _scores("edges", pairs, set().union(*groups)) if groups else {"edges": len(pairs)}
    there = sum(bool(group & pairs) for group in groups)
    return row | ({"links": there, "links_recall": there / len(groups)} if groups else {})


def _scores(what: str, found: set[Any], known: set[Any]) -> dict[str, Any]:
    right = len(found & known)
    precision, recall, f1 = score(len(found), right, len(known))
    return {
        what: len(found),
        f"{what}_right": right,
        f"{what}_precision": precision,
        f"{what}_recall": recall,
        f"{what}_f1": f1,
    }


def score(found: int, right: int, of: int) -> tuple[float | None, float, float]:
    """Precision, recall and F1 of ``right`` among ``found``, where there are ``of`` to be found.

    Nothing found has no precision, and finds nothing.
    """
    precision = right / found if found else None
    return precision, right / of, 2 * right / (found + of)


def _quantiles(network: Network) -> list[float]:
    """Thresholds that leave out about a twentieth of the edges each."""
    weights = sorted({edge.weight for edge in network.edges})
    step = max(1, -(-len(weights) // (_MOST - 1)))
    return [0.0, *(each for each in weights[::step] if each > 0)]
