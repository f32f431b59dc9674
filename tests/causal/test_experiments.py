"""The papers' experiments: tables that agree with single interventions, statistics that find what is there."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch

from headtrace.causal import Signal, intervene
from headtrace.causal.experiments import (
    edge_pairs,
    edges_into_head,
    find_pairs,
    residual_changes,
    single_edges,
)
from headtrace.causal.signals import residual_change
from headtrace.errors import InputError
from headtrace.statistics import compare, interval
from tests.causal.traced import traced


@pytest.fixture(scope="module")
def many():
    """Two circuits of one model (the same one twice: what counts here is bookkeeping)."""
    model, circuit = traced("llama", torch.float64)
    return model, [circuit, circuit]


def test_single_edges_are_measured_both_ways_with_controls(many, tmp_path) -> None:
    model, circuits = many
    found = single_edges(circuits, model, edges="top:4", controls=2)
    assert found.table.height == 2 * 4 * 2 * 2 * 2  # circuits, edges, reaches, actions, measures
    edge = circuits[0].top(4)[3]
    source, target = (circuits[0].node(i).name for i in (edge.source, edge.target))
    mine = found.table.filter(circuit=1, source=source, target=target, side=edge.side)
    for reach in ("local", "global"):
        done = intervene(circuits[0], model, edge, factor=2, reach=reach)
        row = mine.filter(reach=reach, action="boost", measure="metric").row(0, named=True)
        assert row["change"] == pytest.approx(done.metric_after - done.metric_before, abs=1e-10)
        assert len(row["randoms"]) == 2
        assert row["random"] == pytest.approx(np.mean(row["randoms"]))
    rows = found.comparisons()
    assert rows.height == 8
    assert set(rows["n"]) == {8}
    assert set(rows["prompts"]) == {2}
    found.plot(tmp_path / "violins.png")
    assert (tmp_path / "violins.png").stat().st_size > 5000


def test_edges_into_one_head_are_ranked_by_weight(many, tmp_path) -> None:
    model, circuits = many
    node = max(circuits[0].heads(), key=lambda n: len(circuits[0].edges_into(n)))
    found = edges_into_head(circuits[0], model, node.name)
    local = found.table.filter(reach="local").sort("rank")
    assert local.height == len(circuits[0].edges_into(node))
    assert local["weight"].is_sorted()
    assert set(found.correlations()["reach"]) == {"local", "global"}
    found.plot(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").exists()
    with pytest.raises(InputError, match="No edge goes into 'L3H99'"):
        edges_into_head(circuits[0], model, "L3H99")


def test_serial_pairs_lie_on_one_path_and_parallel_pairs_do_not() -> None:
    _, circuit = traced("gpt_neox")
    graph = circuit.to_networkx()
    for arrangement in ("serial", "parallel"):
        pairs = find_pairs(circuit, arrangement, 30)
        assert len(pairs) == 30, arrangement
        for first, second in pairs:
            onward = nx.has_path(graph, first.target, second.source)
            back = nx.has_path(graph, second.target, first.source)
            assert onward == (arrangement == "serial")
            assert not back


def test_a_pair_is_measured_alone_and_together(many, tmp_path) -> None:
    model, circuits = many
    found = edge_pairs(circuits[:1], model, pairs=2, reaches=("local",))
    first, second = find_pairs(circuits[0], "serial", 2)[0]
    row = found.table.filter(arrangement="serial").row(0, named=True)
    for edges, value in (
        ([first], row["single_first"]),
        ([second], row["single_second"]),
        ([first, second], row["joint"]),
    ):
        done = intervene(circuits[0], model, edges)
        assert done.metric_after - done.metric_before == pytest.approx(value, abs=1e-10)
    assert row["sum"] == pytest.approx(row["single_first"] + row["single_second"])
    assert set(found.summary()["arrangement"]) == {"serial", "parallel"}
    found.plot(tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").exists()


def test_residual_changes_are_of_single_edges_and_whole_sides(many, tmp_path) -> None:
    model, circuits = many
    circuit, recording = circuits[0], model.record(list(circuits[0].prompt.token_ids))
    found = residual_changes(circuit, model)
    inner = [e for e in circuit.edges if e.side != "root"]
    assert found.table.filter(what="edge", action="ablate").height == len(inner)
    node = max(circuit.heads(), key=lambda n: len([e for e in circuit.edges_into(n) if e.side == "query"]))
    signals = [Signal.of(circuit, e) for e in circuit.edges_into(node) if e.side == "query"]
    assert len(signals) > 1
    row = found.table.filter(what="side", action="ablate", target=node.name, side="query").row(0, named=True)
    assert row["cosine"] == pytest.approx(residual_change(recording, signals)[0])
    assert row["cosine"] != pytest.approx(residual_change(recording, signals[:1])[0], abs=1e-6)
    found.plot(tmp_path / "residual.png")
    other = Signal.of(circuit, next(e for e in inner if e.target != node.id))
    with pytest.raises(InputError, match="one firing and side"):
        residual_change(recording, [signals[0], other])


def test_the_comparison_finds_a_difference_and_no_difference() -> None:
    generator = np.random.default_rng(0)
    prompt = np.repeat(np.arange(10), 20)
    random = generator.normal(size=200)
    found = compare(
        (random - 1 + 0.1 * generator.normal(size=200)).tolist(), random.tolist(), prompt.tolist()
    )
    assert found.difference == pytest.approx(-1, abs=0.05)
    assert found.difference_low < found.difference < found.difference_high < 0
    assert found.p_edges < 1e-20
    assert found.p_prompts == pytest.approx(2 / 2**10)  # the smallest that ten pairs can give
    assert found.further == 1
    none = compare(random.tolist(), random.tolist(), prompt.tolist())
    assert (none.difference, none.p_edges, none.p_prompts) == (0, 1, 1)


def test_intervals_count_prompts_not_edges() -> None:
    """Edges of one prompt that all agree are one observation: the interval must not shrink with their number."""
    values, prompt = np.repeat([0.0, 1.0, 2.0, 3.0], 50), np.repeat(np.arange(4), 50)
    together, apart = interval(values, prompt), interval(values, np.arange(200))
    assert together[1] - together[0] > 4 * (apart[1] - apart[0])
