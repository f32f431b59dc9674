"""Published circuits to hold a network against: heads, what they do, and which of them speak to which.

A reference is JSON, schema ``headtrace.reference/1``; those of ``references/`` are known by name, and anyone's own
loads from a file.

>>> reference = load_reference("gpt2-ioi")
>>> len(reference.heads), reference.groups()["name mover"]
(26, ((9, 6), (9, 9), (10, 0)))
>>> sorted(load_reference("pythia-160m-ioi").groups())
['S-inhibition', 'induction', 'name mover', 'positive copy suppression', 'previous token']
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from headtrace.circuits.files import file_text, parse
from headtrace.errors import InputError
from headtrace.runs.network_files import checked_data
from headtrace.validation import CHECKED, LARGEST, Index, Text, Words, checked, fail
from headtrace.vocabulary import head_name, parse_head

if TYPE_CHECKING:
    from headtrace.runs.network import Head, Network

SCHEMA = "headtrace.reference/1"
Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]


@checked
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


@checked
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


@checked
class ReferenceEdge:
    """Which heads speak to which."""

    source: Text
    """A group, or one head as `L9H6`."""
    target: Text
    """A group, or one head."""


@dataclass(frozen=True)
class Reference:
    """A published circuit."""

    __pydantic_config__: ClassVar[ConfigDict] = CHECKED

    name: Text
    """A short name."""
    model: ReferenceModel
    """The model that the circuit is of."""
    heads: Annotated[tuple[ReferenceHead, ...], Field(min_length=1)]
    """Its heads."""
    edges: tuple[ReferenceEdge, ...] = ()
    """Which of them speak to which; where it says nothing, only heads are compared."""
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
    return tuple(
        sorted(path.name.removesuffix(".json") for path in _folder().iterdir() if _is_json(path.name))
    )


def load_reference(name: str | Path) -> Reference:
    """A reference by its name, or from a JSON file."""
    if str(name) in reference_names():
        text = (_folder() / f"{name}.json").read_text(encoding="utf-8")
    else:
        known = ", ".join(reference_names())
        text = file_text(name, "a reference file", f"Known by name: {known}.")
    try:
        return reference_from_json(parse(text, "a reference file"))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def reference_from_json(data: Any) -> Reference:
    """A reference from the data of its file."""
    return checked_data(data, SCHEMA, Reference)


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
    from headtrace.models.hub import ALIASES, BUILTIN

    own = {model.name, *model.names}
    own |= {ALIASES[each] for each in own if each in ALIASES}
    return name not in own and name in {BUILTIN, *ALIASES, *ALIASES.values()}


def _folder() -> Any:
    return files("headtrace.runs") / "references"


def _is_json(name: str) -> bool:
    return name.endswith(".json")


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
