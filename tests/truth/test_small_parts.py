"""Models of a few numbers, made by hand so that each shows one rule of complete circuits and no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import headtrace
from headtrace.circuits import Circuit
from headtrace.models import Model
from tests.truth.compiled import Array, Weights, as_model

TOKEN, OTHER, ANSWER, WRONG = range(4)
D_HEAD, HIDDEN, LENGTH = 3, 4, 4


class Dimensions:
    """Named dimensions of the residual; each is a unit vector."""

    def __init__(self, names: str) -> None:
        self.names = names.split()

    def __getitem__(self, name: str) -> Array:
        return np.eye(len(self.names))[self.names.index(name)]


def nothing(d_model: int, layers: int, heads: int = 2) -> Weights:
    """All matrices of a model that does nothing."""
    shapes = {
        "token": (4, d_model),
        "position": (LENGTH, d_model),
        "unembed": (4, d_model),
        "W_Q": (layers, heads, d_model, D_HEAD),
        "W_K": (layers, heads, d_model, D_HEAD),
        "W_V": (layers, heads, d_model, D_HEAD),
        "W_O": (layers, heads, D_HEAD, d_model),
        "W_in": (layers, d_model, HIDDEN),
        "W_out": (layers, HIDDEN, d_model),
    }
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def head(w: Weights, layer: int, number: int, *, match: Sequence[Array], moves: Sequence[Array]) -> None:
    """A head that attends where what it reads at the destination meets what it reads at the source."""
    size = D_HEAD**0.25  # divides what is scaled by 1 / sqrt(d_head) again
    w["W_Q"][layer, number, :, 0], w["W_K"][layer, number, :, 0] = size * match[0], size * match[1]
    w["W_V"][layer, number, :, 0], w["W_O"][layer, number, 0] = moves


def step(w: Weights, layer: int, unit: int, reads: Array, one: Array, writes: Array) -> None:
    """Two hidden units that write once what they read is about one or more: both are on then, so its exact size does
    not matter."""
    w["W_in"][layer, :, unit], w["W_in"][layer, :, unit + 1] = 10 * reads - 4 * one, 10 * reads - 5 * one
    w["W_out"][layer, unit], w["W_out"][layer, unit + 1] = writes, -writes


def traced(model: Model, ids: list[int]) -> Circuit:
    circuit = headtrace.Tracer(model).trace(ids, ANSWER, WRONG, root="linear", paths="complete")
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"
    return circuit


def sources(circuit: Circuit, target: str, side: str) -> set[str]:
    (node,) = (node for node in circuit.nodes if node.name == target)
    return {circuit.node(e.source).name for e in circuit.edges_into(node) if e.side == side}


def test_parts_of_a_write_that_another_mlp_needs_at_once_are_all_found() -> None:
    """MLP 0 writes 0.6 for the position and 0.4 for what a head brings; MLP 1 answers only if it reads both. Without
    the smaller part more than half of the write is left, and MLP 1 does nothing."""
    d = Dimensions("one token brought placed first second answer")
    w = nothing(len(d.names), layers=2)
    w["token"][:], w["token"][TOKEN] = d["one"], d["one"] + d["token"]
    w["position"][1] = d["placed"]
    w["unembed"][ANSWER] = d["answer"]
    head(w, 0, 0, match=(20 * d["one"], d["token"]), moves=(d["token"], d["brought"]))
    step(w, 0, 0, d["placed"], d["one"], d["first"])
    step(w, 0, 2, d["brought"], d["one"], d["second"])
    w["W_in"][1, :, 0] = 6 * d["first"] + 4 * d["second"] - 9 * d["one"]
    w["W_out"][1, 0] = d["answer"]
    circuit = traced(as_model(w), [TOKEN, OTHER])
    assert sources(circuit, "MLP 1 @1", "input") >= {"MLP 0 @1"}
    assert sources(circuit, "MLP 0 @1", "input") >= {"Position @1", "L0H0 1->0"}


def test_signals_that_do_exactly_the_same_are_causes_together() -> None:
    """Two heads write half of a key each. Without either the head attends no more, and they are equal."""
    d = Dimensions("one token at here key answer said")
    w = nothing(len(d.names), layers=2)
    w["token"][:], w["token"][TOKEN] = d["one"], d["one"] + d["token"]
    w["position"][1] = d["here"]
    w["unembed"][ANSWER] = d["answer"]
    for number in (0, 1):
        head(w, 0, number, match=(20 * d["here"], d["token"]), moves=(d["token"], d["key"] / 2))
    head(w, 1, 0, match=(3 * d["one"], d["key"]), moves=(d["key"], d["answer"]))
    circuit = traced(as_model(w), [TOKEN, OTHER, OTHER, OTHER])
    assert sources(circuit, "L1H0 3->1", "key") == {"L0H0 1->0", "L0H1 1->0"}


def test_a_key_signal_that_writes_nothing_at_the_source_is_no_edge(tmp_path: Path) -> None:
    """An MLP marks all other tokens, and a head shuns the mark: it attends to the token that has none."""
    d = Dimensions("one token other mark answer")
    w = nothing(len(d.names), layers=2)
    w["token"][:], w["token"][TOKEN] = d["one"] + d["other"], d["one"] + d["token"]
    w["unembed"][ANSWER] = d["answer"]
    w["W_in"][0, :, 0], w["W_out"][0, 0] = d["other"], d["mark"]
    head(w, 1, 0, match=(-20 * d["one"], d["mark"]), moves=(d["token"], d["answer"]))
    circuit = traced(as_model(w), [OTHER, TOKEN, OTHER, OTHER])
    (node,) = circuit.heads()
    assert node.name == "L1H0 3->1"
    assert [(each.kind, each.layer) for each in node.elsewhere or ()] == [("mlp", 0)]
    assert sources(circuit, node.name, "key") == set()
    circuit.save(tmp_path / "circuit.json")
    assert headtrace.load_circuit(tmp_path / "circuit.json").node(node.id).elsewhere == node.elsewhere


def test_a_small_circuit_is_followed_to_its_end() -> None:
    """Five heads in a row, each moving what the one below it moved: influence is divided by three at each."""
    d = Dimensions("one token here answer a b c d")
    w = nothing(len(d.names), layers=5, heads=1)
    w["token"][:], w["token"][TOKEN] = d["one"], d["one"] + d["token"]
    w["position"][1] = d["here"]
    w["unembed"][ANSWER] = d["answer"]
    for layer, (reads, writes) in enumerate(
        ("token a", "a b", "b c", "c d", "d answer")[i].split() for i in range(5)
    ):
        where = d["token"] if layer == 0 else d["here"]
        head(w, layer, 0, match=(20 * d["one"], where), moves=(d[reads], d[writes]))
    model, ids = as_model(w), [TOKEN, OTHER, OTHER]
    circuit = traced(model, ids)
    assert (circuit.method.settings or {})["min_influence"] < 0.02
    assert sources(circuit, "L0H0 1->0", "key") == {"Embedding @0"}
    chosen = headtrace.Tracer(model, min_influence=0.02)
    cut = chosen.trace(ids, ANSWER, WRONG, root="linear", paths="complete")
    assert {node.name for node in cut.nodes if node.kind == "head" and not node.expanded} == {"L0H0 1->0"}
    assert [circuit] == headtrace.Tracer(model).trace_batch(
        [ids], ANSWER, WRONG, root="linear", paths="complete"
    )


def test_what_weakens_a_signal_through_an_mlp_is_followed() -> None:
    """An MLP adds up what two heads bring, one of them against the other, and writes a query with the rest."""
    d = Dimensions("one token other last sum key looks answer")
    w = nothing(len(d.names), layers=2)
    w["token"][:], w["token"][TOKEN] = d["one"] + d["other"], d["one"] + d["token"]
    w["position"][3] = d["last"]
    w["position"][2] = d["key"]
    w["unembed"][ANSWER] = d["answer"]
    head(w, 0, 0, match=(20 * d["last"], d["token"]), moves=(d["token"], d["sum"]))
    head(w, 0, 1, match=(20 * d["last"], d["other"]), moves=(d["other"], -0.6 * d["sum"]))
    w["W_in"][0, :, 0], w["W_out"][0, 0] = d["sum"], d["looks"]
    head(w, 1, 0, match=(5 * d["looks"], d["key"]), moves=(d["key"], d["answer"]))
    circuit = traced(as_model(w), [TOKEN, TOKEN, OTHER, TOKEN])
    assert {circuit.node(e.source).name for e in circuit.edges if e.side == "input" and e.weight < 0} == {
        "L0H1 3->2"
    }
    assert sources(circuit, "L0H1 3->2", "key") == {"Embedding @2"}
