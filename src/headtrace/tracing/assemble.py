"""From what a sweep found to a Circuit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headtrace import __version__
from headtrace.circuits import Circuit, Edge, Elsewhere, Method, ModelInfo, Node, Prompt, Root
from headtrace.tracing.firing import Cause, FiringCauses, SideCauses
from headtrace.tracing.sweep import PromptTrace, in_graph, is_elsewhere, shares_of
from headtrace.vocabulary import Component, Firing, Kind, Side

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

_ORDER = {"root": 0, "head": 1, "mlp": 2, "attention_bias": 3, "offset": 4, "embedding": 5}
Place = tuple[Kind, "int | None", "int | None", "int | None", "int | None"]
EdgeParts = tuple[Place, Place, Side, Cause]


ROOT: Place = ("root", None, None, None, None)


def place_of(component: Component, position: int) -> Place:
    """A component at the position where it is read: kind, layer, head, dest, src."""
    return (component.kind, component.layer, component.head, position, component.src)


def model_info(model: Model) -> ModelInfo:
    return ModelInfo(model.name, model.revision, model.architecture.model_type, model.weights_sha256)


def prompt_of(recording: Recording, prompt: int, text: str | None) -> Prompt:
    ids = tuple(recording.token_ids[prompt, : recording.lengths[prompt]].tolist())
    return Prompt(text, ids, recording.model.token_labels(ids))


def assemble(
    recording: Recording,
    prompt: int,
    text: str | None,
    trace: PromptTrace,
    method: Method,
    answer: list[int],
    wrong: list[int] | None,
) -> Circuit:
    """The circuit of one prompt. Nodes are numbered from the root down, so equal traces give equal files."""
    model, root = recording.model, trace.root
    edges = _edges(trace)
    places: set[Place] = {ROOT}
    for source, target, _, _ in edges:
        places |= {source, target}
    numbers = {place: i for i, place in enumerate(sorted(places, key=_place_order))}
    influence = _influence(trace, edges)
    return Circuit(
        model=model_info(model),
        prompt=prompt_of(recording, prompt, text),
        root=Root(
            kind=root.kind,
            answer=tuple(answer),
            wrong=None if wrong is None else tuple(wrong),
            value=root.value,
            position=root.position,
            layer=root.layer if root.kind == "direction" else None,
            support=root.support,
            answer_tokens=model.token_labels(answer) or None,
            label=root.label,
            wrong_tokens=None if wrong is None else model.token_labels(wrong),
        ),
        method=method,
        nodes=tuple(_node(place, number, trace, influence) for place, number in numbers.items()),
        edges=tuple(
            Edge(
                numbers[source],
                numbers[target],
                side,
                cause.weight,
                cause.channels if side != "root" else None,
            )
            for source, target, side, cause in edges
        ),
        reason=root.reason,
        influence_kept=None if root.reason else trace.influence_kept,
        unexplained=tuple(str(f) for f, found in sorted(trace.causes.items()) if not found.explained),
    )


def _edges(trace: PromptTrace) -> list[EdgeParts]:
    """Source place, target place, side and cause of every edge."""
    edges: list[EdgeParts] = [
        (place_of(s.component, trace.root.position), ROOT, "root", Cause(s.component, (), s.weight))
        for s in trace.root.seeds
    ]
    for firing, found in trace.causes.items():
        target: Place = ("head", firing.layer, firing.head, firing.dest, firing.src)
        sides: tuple[tuple[Side, SideCauses, int], ...] = (
            ("query", found.query, firing.dest),
            ("key", found.key, firing.src),
        )
        for side, part, position in sides:
            for cause in in_graph(part.causes, position):
                edges.append((place_of(cause.component, position), target, side, cause))  # noqa: PERF401 (typed)
    return edges


def _place_order(place: Place) -> tuple[int, ...]:
    kind, *rest = place
    layer = rest[0] if rest[0] is not None else -1
    return (0 if kind == "root" else 1, -layer, _ORDER[kind], *(-1 if r is None else r for r in rest[1:]))


def _influence(trace: PromptTrace, edges: list[EdgeParts]) -> dict[Place, float]:
    """Influence of every place: heads have theirs from the sweep, leaves get theirs from the edges."""
    groups: dict[tuple[Place, str], list[tuple[Place, float]]] = {}
    for source, target, side, cause in edges:
        groups.setdefault((target, side), []).append((source, cause.weight))
    sides: dict[Place, int] = {}
    for (target, _), items in groups.items():
        sides[target] = sides.get(target, 0) + any(weight > 0 for _, weight in items)
    influence: dict[Place, float] = {ROOT: 1.0}
    for firing, value in trace.influence.items():
        influence[("head", firing.layer, firing.head, firing.dest, firing.src)] = value
    for (target, _), items in groups.items():
        for (source, _), share in zip(items, shares_of([w for _, w in items]), strict=True):
            if source[0] != "head":
                part = influence[target] * share / max(1, sides[target])
                influence[source] = influence.get(source, 0.0) + part
    return influence


def _node(place: Place, number: int, trace: PromptTrace, influence: dict[Place, float]) -> Node:
    kind, layer, head, dest, src = place
    extra: dict[str, Any] = {}
    if kind == "head":
        firing = Firing(*place[1:])  # type: ignore[arg-type]
        extra = {"attention": trace.attention.get(firing), "threshold": trace.thresholds.get(firing)}
        found = trace.causes.get(firing)
        if found is not None:
            extra |= _found(found)
    return Node(
        number,
        kind,
        layer,
        head,
        dest,
        src,
        influence=influence.get(place, 0.0),
        **extra,  # type: ignore[arg-type]
    )


def _found(found: FiringCauses) -> dict[str, Any]:
    elsewhere = [
        Elsewhere(c.component.layer, c.component.head, c.component.src, c.channels, c.weight)  # type: ignore[arg-type]
        for c in found.key.causes
        if is_elsewhere(c.component, found.firing.src)
    ]
    return {
        "expanded": True,
        "explained": found.explained,
        "predicted": {"query": found.query.predicted, "key": found.key.predicted},
        "elsewhere": tuple(elsewhere) or None,
    }


def method_record(
    name: str, tau: float | str | None, ig_steps: int | None, settings: dict[str, Any]
) -> Method:
    return Method(name, tau, ig_steps, __version__, settings or None)
