"""Circuits for the tests of networks: real ones of the built-in model, and made-up ones of any shape."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

import headtrace
from headtrace.circuits import Circuit, Edge, LogitDifference, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.tasks import Example, load_task

LENGTH = 8
ROLES = {"IO": 1, "S1": 3, "S2": 5, "end": 7}


@cache
def ioi(paths: str = "attention") -> tuple[tuple[Circuit, ...], tuple[Example, ...]]:
    """Thirty circuits of the built-in model, and the examples they were traced from."""
    model = headtrace.load("builtin")
    examples = tuple(load_task("ioi", model.tokenizer, n_per_cell=1))
    return tuple(headtrace.Tracer(model).trace_batch(list(examples), paths=paths)), examples


def circuit(
    *edges: tuple[Node, Node, str, float], channels: tuple[int, ...] | None = None, **model: object
) -> Circuit:
    """A circuit of these edges: source, target, side, weight; nodes are numbered here, node 0 is the root."""
    nodes: dict[object, Node] = {}
    made: list[Edge] = []
    for source, target, side, weight in edges:
        for node in (target, source):
            values = {**node.__dict__, "id": len(nodes)}
            nodes.setdefault(node.site, Node(**values))
        ids = nodes[source.site].id, nodes[target.site].id
        made.append(Edge(*ids, side, weight, channels if side in ("query", "key") else None))  # type: ignore[arg-type]
    return Circuit(
        ModelInfo(**{"name": "made-up", **model}),  # type: ignore[arg-type]
        PromptInfo(None, tuple(range(LENGTH)), ("<s>", *"abcdefg")),
        LogitDifference((1,), (2,), value=1.0),
        MethodInfo("acc++"),
        tuple(nodes.values()),
        tuple(made),
    )


ROOT = Node(0, "root")


def head(layer: int, number: int, dest: int, src: int, **more: object) -> Node:
    return Node(0, "head", layer, number, dest, src, attention=0.5, expanded=True, **more)  # type: ignore[arg-type]


@st.composite
def circuits(draw: st.DrawFn) -> Circuit:
    """A firing or two under the root, with heads and MLPs below them."""
    position = st.integers(0, LENGTH - 1)
    edges: dict[tuple[object, object, str], tuple[Node, Node, str, float]] = {}
    for _ in range(draw(st.integers(1, 3))):
        dest = draw(position)
        top = head(3, draw(st.integers(0, 2)), dest, draw(st.integers(0, dest)))
        edges[top.site, ROOT.site, "root"] = (top, ROOT, "root", draw(st.floats(0.1, 3)))
        for _ in range(draw(st.integers(0, 4))):
            side = draw(st.sampled_from(("query", "key")))
            at = dest if side == "query" else top.src
            assert at is not None
            low = head(draw(st.integers(0, 2)), draw(st.integers(0, 2)), at, draw(st.integers(0, at)))
            source = draw(st.sampled_from((low, Node(0, "mlp", low.layer, None, at))))
            edges[source.site, top.site, side] = (source, top, side, draw(st.floats(0, 1)))
    return circuit(*edges.values(), channels=tuple(draw(st.sets(st.integers(0, 5), max_size=3))))
