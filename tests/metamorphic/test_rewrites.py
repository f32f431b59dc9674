"""The same function, written otherwise, has the same circuits up to renaming: on eight families, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import headtrace
from headtrace.circuits import Circuit, Node
from headtrace.circuits.files import loads
from headtrace.explorer.panels.circuits import trace as trace_in_the_explorer
from headtrace.explorer.panels.session import Session
from headtrace.request import TraceRequest
from tests.explorer_server.live import live
from tests.metamorphic.rewrite import FAMILIES, REWRITES, Renaming
from tests.tiny import prompts, tiny_hf, top_two

SAME = 1e-6
"""Sums of float64 numbers through a few layers differ by 1e-12; channels with near singular values by more."""
LENGTHS = (11, 7, 9)
PATHS = ("attention", "complete")


def untied(name: str) -> Any:
    """A tiny model in float64 whose unembedding is its own."""
    return tiny_hf(name, dtype=torch.float64, tie_word_embeddings=False)


@cache
def original(name: str) -> headtrace.Model:
    return headtrace.load(untied(name))


@cache
def answers(name: str, place: int) -> tuple[int, int]:
    return top_two(original(name), prompts(0, LENGTHS)[place])


@cache
def expected(name: str, paths: str, place: int) -> Circuit:
    model = original(name)
    return headtrace.Tracer(model).trace(prompts(0, LENGTHS)[place], *answers(name, place), paths=paths)


def edges(circuit: Circuit, renaming: Renaming | None = None) -> dict[tuple[Any, ...], tuple[float, Any]]:
    """Weight and channels of each edge by its places, under the names that a rewrite gives them."""
    renaming = renaming or Renaming()

    def place(node: Node) -> tuple[Any, ...]:
        layer, head = node.layer, node.head
        if layer is not None and head is not None:
            head = renaming.heads.get((layer, head), head)
        return node.kind, None if layer is None else layer + renaming.layers, head, node.dest, node.src

    nodes = {node.id: place(node) for node in circuit.nodes}
    return {
        (nodes[edge.source], nodes[edge.target], edge.side): (edge.weight, edge.channels)
        for edge in circuit.edges
    }


def assert_same(found: Circuit, wanted: Circuit, renaming: Renaming | None = None) -> None:
    here, there = edges(found), edges(wanted, renaming)
    assert len(wanted.edges) > 3, "a circuit that says something"
    assert here.keys() == there.keys()
    for key, (weight, channels) in there.items():
        assert here[key][1] == channels, key
        assert abs(here[key][0] - weight) <= SAME * max(1.0, abs(weight)), key


CASES = [(rewrite, name) for rewrite, (_, families) in REWRITES.items() for name in families]


@pytest.mark.parametrize(("rewrite", "name"), CASES)
def test_the_same_function_has_the_same_circuits(rewrite: str, name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        hf, renaming = REWRITES[rewrite][0](untied(name), generator)
    model, ids = headtrace.load(hf), prompts(0, LENGTHS)[0]
    given = renaming.ids(ids)
    logits, own = model.record(given).logits[0, -1], original(name).record(ids).logits[0, -1]
    moved = logits if renaming.tokens is None else logits[renaming.tokens]
    torch.testing.assert_close(
        moved - moved.mean(), own - own.mean(), rtol=0, atol=1e-8 * float(own.abs().max())
    )
    for paths in PATHS:
        found = headtrace.Tracer(model).trace(given, *renaming.ids(list(answers(name, 0))), paths=paths)
        assert_same(found, expected(name, paths, 0), renaming)


@pytest.mark.slow
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_alone_in_a_batch_with_padding_in_a_run_and_in_the_explorer(
    name: str, paths: str, tmp_path: Path
) -> None:
    model, ids = original(name), prompts(0, LENGTHS)
    lines = [
        {"tokens": each, "answer": answers(name, place)[0], "wrong": answers(name, place)[1]}
        for place, each in enumerate(ids)
    ]
    run = headtrace.run(model, lines, out=tmp_path / "run", paths=paths, root="linear")  # one batch: padded
    session, names = Session([model]), run.prompts.sort("index").select("id").collect()["id"].to_list()
    for place, line in enumerate(lines):
        alone = headtrace.Tracer(model).trace(
            line["tokens"], line["answer"], line["wrong"], paths=paths, root="linear"
        )
        assert_same(run.circuit(names[place]), alone)
        request = TraceRequest.create(
            line["tokens"], answer=line["answer"], wrong=line["wrong"], paths=paths, root="linear"
        )
        assert_same(trace_in_the_explorer(session, request)[1], alone)


@pytest.mark.slow
def test_over_http_as_in_python() -> None:
    """A real server in a thread, and what a browser sends: the file that it gives back is the tracer's circuit."""
    model, ids = original("llama"), prompts(0, LENGTHS)[0]
    answer, wrong = answers("llama", 0)
    with live([model]) as server:
        for paths in PATHS:
            asked = {"answer": answer, "wrong": wrong, "paths": paths}
            job = server.about("trace", {"tokens": ids}, asked)
            assert job.status == 202, job.body
            assert [name for _, name, _ in server.events(job.json()["id"])][-1] == "done"
            saved = server.get(f"/api/jobs/{job.json()['id']}/circuit.json")
            assert_same(loads(saved.body.decode()), expected("llama", paths, 0))
