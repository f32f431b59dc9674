"""Circuits made up for tests and benchmarks: a small one known by heart, and random ones of any size."""

from __future__ import annotations

import random
from dataclasses import replace

from headtrace.circuits import (
    Circuit,
    CompetingKeySignal,
    Direction,
    Edge,
    Evidence,
    EvidenceExample,
    Likelihood,
    LogitDifference,
    MethodInfo,
    ModelInfo,
    Neuron,
    Node,
    PromptInfo,
)
from headtrace.circuits.graph import node_influence

MODEL = ModelInfo("made-up", "main", "LlamaForCausalLM", "0" * 64)
TOKENS = ("When", " Mary", " and", " John", " met", ",", " John", " told")


def small_circuit(tokens: tuple[str, ...] = TOKENS) -> Circuit:
    """Ten nodes, eleven edges, every kind; one measured effect, one description, one unexpanded firing."""
    nodes = (
        Node(0, "root", expanded=True),
        Node(
            *(1, "head", 9, 6, 7, 1),
            attention=0.75,
            expanded=True,
            predicted={"query": 0.2, "key": 0.25},
            elsewhere=(CompetingKeySignal(8, 3, 5, (2, 6), 0.0125),),
        ),
        Node(2, "head", 5, 2, 7, 6, attention=0.5, expanded=True, threshold=0.3125),
        Node(3, "head", 4, 0, 1, 0, attention=0.9),
        Node(4, "mlp", 3, None, 7),
        Node(5, "mlp", 0, None, 1),
        Node(6, "embedding", None, None, 1),
        Node(7, "embedding", None, None, 6),
        Node(8, "attention_bias", 2, None, 7),
        Node(9, "offset", 9, 6, 7),
    )
    edges = (
        Edge(1, 0, "root", 2.5),
        Edge(4, 0, "root", 0.5),
        Edge(
            2,
            1,
            "query",
            0.3,
            (1, 4),
            effect={"attention": -0.31, "metric": -1.25},
            description="a name, again",
        ),
        Edge(4, 1, "query", 0.1, (7,)),
        Edge(8, 1, "query", 0.05, (2,)),
        Edge(9, 1, "query", 0.025, (0,)),
        Edge(3, 1, "key", 0.2, (3,)),
        Edge(5, 1, "key", 0.15, (3, 11)),
        Edge(6, 1, "key", 0.1, (5,)),
        Edge(4, 2, "query", 0.2, (9,)),
        Edge(7, 2, "key", 0.15, (9,)),
    )
    circuit = Circuit(
        MODEL,
        PromptInfo("".join(tokens), tuple(range(100, 100 + len(tokens))), tokens),
        LogitDifference((101,), (103,), value=3.5, position=7),
        MethodInfo("acc++", "min(1, 2.5/n)", 64, "0.1.0"),
        nodes,
        edges,
        influence_kept=1.0,
    )
    return with_influence(circuit)


def worded_circuit(text: str = "The source is a name.", token: str = " Paul") -> Circuit:
    """The small circuit with words on its signals: supported ones, unsupported ones, and some that nobody judged."""
    pieces = ("… went to the park and", token, " gave a book", " to", " …")
    shown = EvidenceExample(pieces, dest=3, src=1, score=2.5, holds=True)
    other = EvidenceExample((" met", token), dest=1, src=1, score=1.25, holds=False)
    good = Evidence(True, 2e-10, 0.95, (0.835, 0.986), 40, "lexical", "lexical", (shown, other))
    weak = Evidence(False, 0.31, 0.55, (0.4, 0.69), 40, "openai", "openai", (other,))
    said = {(2, 1): (text, good), (5, 1): (text, good), (4, 1): ("The destination is a verb.", weak)}
    said[7, 2] = ("Anything.", Evidence(False, judged=3))
    circuit = small_circuit()
    edges = [
        replace(edge, description=words, evidence=evidence)
        for edge in circuit.edges
        for words, evidence in [said.get((edge.source, edge.target), (edge.description, None))]
    ]
    return circuit.with_edges(tuple(edges))


def content_circuit() -> Circuit:
    """What is moved as well as why: every kind and side, an expanded MLP, an opposing edge, biases of all readers."""
    nodes = (
        Node(0, "root", expanded=True),
        Node(1, "head", 9, 6, 7, 1, attention=0.75, expanded=True, contribution=2.0),
        Node(2, "mlp", 5, None, 1, expanded=True, contribution=1.5),
        Node(3, "head", 5, 2, 1, 0, attention=0.5, contribution=0.5),
        Node(4, "embedding", None, None, 1),
        Node(5, "attention_bias", 5, None, 1),
        Node(6, "offset", 9, 6, 7),
        Node(7, "offset", 5, None, 1),
        Node(8, "offset", None, None, 7, contribution=-0.25),
        Node(9, "rounding", 5, None, 1),
    )
    edges = (
        Edge(1, 0, "root", 2.0, contribution=2.0),
        Edge(8, 0, "root", -0.25, contribution=-0.25),
        Edge(2, 1, "value", 1.5, contribution=1.5),
        Edge(9, 1, "value", 0.001, contribution=0.001),
        Edge(4, 1, "key", 0.25, (3,)),
        Edge(6, 1, "query", 0.125, (0, 2)),
        Edge(3, 2, "input", 0.75, contribution=0.75),
        Edge(4, 2, "input", 0.5, contribution=0.5),
        Edge(5, 2, "input", 0.25, contribution=0.25),
        Edge(7, 2, "input", -0.125, contribution=-0.125),
    )
    circuit = Circuit(
        MODEL,
        PromptInfo("".join(TOKENS), tuple(range(100, 108)), TOKENS),
        Direction(layer=10, position=7, vector=(0.5, -0.5), value=1.75, label="a name is due"),
        MethodInfo("acc++", 0.5, 64, "0.1.0", {"paths": "complete"}),
        nodes,
        edges,
        influence_kept=0.9,
    )
    return with_influence(circuit)


def complete_circuit(tokens: tuple[str, ...] = TOKENS) -> Circuit:
    """A complete circuit as it is traced: tokens with their contributions, an MLP with neurons that wrote a key signal,
    a head and a token that oppose the answer, and one chain that leads to a signal only."""
    nodes = (
        Node(0, "root", expanded=True, contribution=3.5),
        Node(1, "head", 9, 6, 7, 1, attention=0.75, threshold=0.3125, expanded=True, contribution=2.75),
        Node(2, "head", 8, 4, 7, 3, attention=0.5, threshold=0.3125, contribution=-1.25),
        Node(
            *(3, "mlp", 5, None, 1),
            expanded=True,
            contribution=2.5,
            neurons=(Neuron(12, 1.25), Neuron(3, -0.5)),
        ),
        Node(4, "head", 3, 2, 7, 6, attention=0.9, threshold=0.3125, expanded=True, contribution=0.01),
        Node(5, "mlp", 2, None, 6, expanded=True, contribution=-0.125),
        Node(6, "head", 0, 1, 1, 0, attention=0.25, contribution=0.125),
        Node(7, "embedding", None, None, 1, contribution=3.75),
        Node(8, "embedding", None, None, 3, contribution=-1.5),
        Node(9, "embedding", None, None, 6, contribution=-0.25),
    )
    edges = (
        Edge(1, 0, "root", 2.75),
        Edge(2, 0, "root", -1.25),
        Edge(3, 1, "value", 2.5, contribution=2.5),
        Edge(3, 1, "key", 0.25, (3, 11), through=(6, 7), left=0.25),
        Edge(4, 1, "query", 0.125, (0, 2)),
        Edge(7, 3, "input", 2.25, contribution=2.25),
        Edge(6, 3, "input", 0.125, contribution=0.125),
        Edge(8, 2, "value", -1.25, contribution=-1.25),
        Edge(5, 4, "value", 0.75, contribution=-0.0625),
        Edge(9, 5, "input", 0.5, contribution=-0.25),
    )
    circuit = Circuit(
        MODEL,
        PromptInfo(
            "".join(tokens), tuple(range(100, 108)), tokens, (0.25, 3.75, 0.0, -1.5, 0.0, 0.002, -0.25, 0.75)
        ),
        LogitDifference((101,), (103,), value=3.5, position=7),
        MethodInfo("acc++", "min(1, 2.5/n)", 64, "0.1.0", {"paths": "complete", "min_influence": 0.02}),
        nodes,
        edges,
        influence_kept=0.9,
    )
    return with_influence(circuit)


def many_seeds() -> Circuit:
    """A complete circuit with nine edges into the root, which is less than their sum; the weakest come first, and
    content of small contribution has large weights, because it became a signal."""
    circuit = complete_circuit()
    writers = [Node(10 + i, "mlp", 10 + i, None, 7, contribution=0.375 * (i + 1)) for i in range(7)]
    seeds = [Edge(node.id, 0, "root", node.contribution or 0.0) for node in writers]
    found = replace(circuit, nodes=(*circuit.nodes, *writers), edges=(*seeds, *reversed(circuit.edges)))
    return with_influence(found)


def random_circuit(n_edges: int = 2000, n_tokens: int = 40, n_layers: int = 30, seed: int = 0) -> Circuit:
    """A circuit of exactly ``n_edges`` edges, grown downwards from the root as a trace grows."""
    rng = random.Random(seed)
    last = n_tokens - 1
    places: dict[tuple[str, int | None, int | None, int | None, int | None], int] = {
        ("root",) + (None,) * 4: 0
    }
    edges: dict[tuple[int, int, str], Edge] = {}
    waiting: list[tuple[int, int, int, int]] = []

    def add(
        place: tuple[str, int | None, int | None, int | None, int | None], target: int, side: str
    ) -> None:
        fresh = place not in places
        source = places.setdefault(place, len(places))
        weight = 3 * rng.random() if side == "root" else rng.random() ** 4
        channels = (
            None if side == "root" else tuple(sorted(rng.sample(range(64), rng.choice((1, 1, 1, 2, 3)))))
        )
        edges.setdefault((source, target, side), Edge(source, target, side, round(weight, 5), channels))  # type: ignore[arg-type]
        if fresh and place[0] == "head" and place[1]:
            waiting.append((source, place[1], place[3], place[4]))  # type: ignore[arg-type]

    for layer in range(n_layers - 1, n_layers - 6, -1):
        add(("head", layer, rng.randrange(9), last, rng.randrange(n_tokens)), 0, "root")
    while len(edges) < n_edges:
        firing, layer, dest, src = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        for side, position in (("query", dest), ("key", src)):
            for _ in range(rng.randrange(2, 8)):
                if len(edges) >= n_edges:
                    break
                below = rng.randrange(layer)
                if rng.random() < 0.45:
                    source = rng.randrange(position + 1)
                    add(("head", below, rng.randrange(9), position, source), firing, side)
                elif rng.random() < 0.15:
                    add(("embedding", None, None, position, None), firing, side)
                else:
                    add(("mlp", below, None, position, None), firing, side)
    targets = {edge.target for edge in edges.values()}
    nodes = [
        Node(i, *place, attention=rng.random() if place[0] == "head" else None, expanded=i in targets)  # type: ignore[arg-type]
        for place, i in places.items()
    ]
    words = (
        "".join(rng.choice("aeioubdklmnrst") for _ in range(rng.randrange(1, 8))) for _ in range(n_tokens)
    )
    tokens = tuple(f" {word}" for word in words)
    circuit = Circuit(
        MODEL,
        PromptInfo("".join(tokens), tuple(range(n_tokens)), tokens),
        Likelihood((3,), value=-1.5, position=last),
        MethodInfo("acc++", "min(1, 2.5/n)", 64, "0.1.0"),
        tuple(nodes),
        tuple(edges.values()),
        influence_kept=0.93,
    )
    return with_influence(circuit)


def with_influence(circuit: Circuit) -> Circuit:
    """The same circuit with the influence of every node filled in."""
    influence = node_influence(circuit)
    return replace(
        circuit, nodes=tuple(replace(node, influence=influence[node.id]) for node in circuit.nodes)
    )
