"""What a verification reports and keeps."""

from __future__ import annotations

import json

import polars as pl
import pytest
import torch

import headtrace
from headtrace.causal import Signal
from headtrace.errors import InputError
from tests.causal.traced import traced


@pytest.fixture(scope="module")
def report():
    model, circuit = traced("llama", torch.float64)
    return headtrace.verify(circuit, model, edges="top:6", controls=3, seed=4)


def test_files_hold_what_was_measured(report, tmp_path) -> None:
    report.save(tmp_path)
    kept = json.loads((tmp_path / "verification.json").read_text())
    assert kept["max_prediction_error"] == report.max_prediction_error > 0
    assert kept["n_edges"] == 6
    assert len(kept["predictions"]) == kept["n_predictions"] == len(report.predictions)
    table = pl.read_parquet(tmp_path / "edges.parquet")
    assert table.equals(report.edges)
    assert table["controls_ablate_metric"].list.len().to_list() == [3] * 6
    circuit = headtrace.load_circuit(tmp_path / "circuit.json")
    measured = [e for e in circuit.edges if e.effect]
    assert len(measured) == 6
    own = {(e.edge.source, e.edge.target, e.edge.side): e for e in report.effects}
    for edge in measured:
        effect = own[(edge.source, edge.target, edge.side)]
        assert edge.effect["attention"] == effect.ablate_attention
        assert edge.effect["metric"] == effect.ablate_metric


def test_effects_are_changes_from_the_clean_run(report) -> None:
    model, circuit = traced("llama", torch.float64)
    effect = report.effects[2]
    done = headtrace.causal.intervene(circuit, model, effect.edge, factor=2.0)
    assert done.attention_before == pytest.approx(effect.attention)
    assert done.attention_after - done.attention_before == pytest.approx(effect.boost_attention, abs=1e-12)
    assert done.metric_after - done.metric_before == pytest.approx(effect.boost_metric, abs=1e-10)
    assert done.metric_before == pytest.approx(circuit.root.value)
    assert done.edges[0].cosine == pytest.approx(effect.boost_cosine)


def test_controls_depend_on_the_seed_and_claimed_effects_do_not(report) -> None:
    model, circuit = traced("llama", torch.float64)
    again, other = (headtrace.verify(circuit, model, edges="top:6", controls=3, seed=seed) for seed in (4, 5))
    for mine, theirs in zip(again.effects, report.effects, strict=True):
        assert mine.edge == theirs.edge
        assert mine.control_ablate_attention == pytest.approx(theirs.control_ablate_attention, abs=1e-12)
        assert mine.control_boost_metric == pytest.approx(theirs.control_boost_metric, abs=1e-10)
    assert [e.ablate_attention for e in other.effects] == pytest.approx(
        [e.ablate_attention for e in report.effects]
    )
    assert [e.control_ablate_attention for e in other.effects] != [
        e.control_ablate_attention for e in report.effects
    ]


def test_progress_counts_every_intervention() -> None:
    model, circuit = traced("llama", torch.float64)
    seen: list[tuple[int, int]] = []
    report = headtrace.verify(circuit, model, edges="top:3", controls=2, progress=lambda *a: seen.append(a))
    total = len(report.predictions) + 18
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) > 1


def test_a_global_verification_leaves_offsets_out_and_says_so() -> None:
    model, circuit = traced("gpt2")
    offsets = [e for e in circuit.edges if circuit.node(e.source).kind == "offset" and e.side != "root"]
    assert offsets
    position = 1 + max(circuit.top(500).index(e) for e in offsets)
    report = headtrace.verify(circuit, model, edges=f"top:{position}", controls=0, reach="global")
    assert len(report.effects) == position - len(offsets)
    assert f"Left out: {len(offsets)} edges" in report.summary()
    with pytest.raises(InputError, match="no component writes it"):
        headtrace.verify(circuit, model, edges=offsets[:1], controls=0, reach="global")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"edges": "best"}, "top:20"),
        ({"controls": -1}, "controls"),
        ({"reach": "far"}, "reach"),
        ({"scope": "all"}, "scope"),
    ],
)
@pytest.mark.ill_typed
def test_bad_options_say_what_is_expected(how: dict, message: str) -> None:
    model, circuit = traced("llama", torch.float64)
    with pytest.raises(InputError, match=message):
        headtrace.verify(circuit, model, **how)


def test_the_figure_is_drawn(report, tmp_path) -> None:
    report.plot(tmp_path / "effects.png")
    assert (tmp_path / "effects.png").read_bytes().startswith(b"\x89PNG")


def test_claimed_signals_are_those_of_the_edge() -> None:
    _, circuit = traced("llama", torch.float64)
    edge = circuit.top(1)[0]
    signal = Signal.of(circuit, edge)
    assert str(signal.firing) == circuit.node(edge.target).name
    assert signal.channels == edge.channels
