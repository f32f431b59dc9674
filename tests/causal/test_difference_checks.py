"""Difference circuits put to the test: numbers computed again, components patched to the other run, controls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headtrace
from headtrace.causal import patch_sets
from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.roots import LogitDifference
from headtrace.vocabulary import Site
from tests.tiny import prompts, tiny_model

MARY = "When Mary and John went to the store, John gave a drink to"
FLIPPED = "When Mary and John went to the store, Mary gave a drink to"
OTHERS = "When Anna and Tom went to the store, Emma gave a drink to"


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def circuit(model: headtrace.Model) -> Circuit:
    return headtrace.Tracer(model).trace(
        MARY, answer=" Mary", wrong=" John", paths="difference", counterfactual=[FLIPPED, OTHERS]
    )


@pytest.fixture(scope="module")
def report(circuit: Circuit, model: headtrace.Model) -> headtrace.Report:
    return headtrace.verify(circuit, model, controls=2)


@pytest.mark.parametrize(
    "options",
    [
        {"answer": " Mary", "wrong": " John"},
        {"answer": " Mary"},
        {"answer": " Mary and"},
        {
            "heads": ["L1H0", "L1H1", "L1H2", "L1H3", "L2H3"],
            "counterfactual": "When Mary and Tom went to the store, John gave a drink to",
        },
        {"direction": [], "layer": 2, "position": 14},
    ],
    ids=["logit difference", "likelihood", "continuation", "heads", "direction"],
)
def test_every_root_passes(model: headtrace.Model, options: dict[str, object], tmp_path: Path) -> None:
    if "direction" in options:
        options["direction"] = torch.linspace(-1, 1, model.d_model).tolist()
    options = {"counterfactual": FLIPPED, **options}
    found = headtrace.Tracer(model).trace(MARY, paths="difference", **options)
    again = headtrace.load_circuit(found.save(tmp_path / "c.json"))
    report = headtrace.verify(again, model, edges="none")
    assert report.verdict == "PASS", report.summary()
    assert report.checked["flow"] == len(found.nodes)
    assert report.checked["weight"] == len(found.edges)


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt_neox", "mixtral", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_families_pass(name: str, dtype: torch.dtype) -> None:
    from tests.tiny import tiny_hf

    model = tiny_model(name) if dtype == torch.float32 else headtrace.load(tiny_hf(name).to(dtype))
    ids, other = prompts(0)[0], prompts(1)[0]
    found = headtrace.Tracer(model).trace(ids, answer=5, wrong=7, paths="difference", counterfactual=[other])
    report = headtrace.verify(found, model, edges="top:4", controls=1)
    assert report.verdict == "PASS", report.summary()
    assert len(report.patches.nodes) <= 4


def test_what_is_measured_is_a_run_with_the_components_of_the_other(
    model: headtrace.Model, circuit: Circuit, report: headtrace.Report
) -> None:
    """Against the writes themselves, exchanged by hand in a run."""
    from headtrace.causal.changes import GlobalEdit
    from headtrace.causal.execute import rerun

    clean = model.record(MARY)
    node = max(circuit.heads(), key=lambda node: abs(node.flow))
    effects = []
    for text in (FLIPPED, OTHERS):
        other = model.record(text)
        write = other.write(node.site.component, 0) - clean.write(node.site.component, 0)
        keep = torch.zeros_like(write)
        keep[node.dest] = write[node.dest]
        logits = rerun(clean, [GlobalEdit(node.site.component, keep)]).last_logits()
        lost = float(logits[circuit.root.answer[0]] - logits[circuit.root.wrong[0]])
        effects.append(circuit.root.value - lost)
    measured = next(each.measured for each in report.patches.nodes if each.name == node.name)
    assert measured == pytest.approx(sum(effects) / 2, abs=1e-3)


def test_all_of_a_kind_patched_is_the_other_run(model: headtrace.Model) -> None:
    """Every head, MLP and nothing else: only the embedding at the last token is left, and that does not differ."""
    clean, other = model.record(MARY), model.record(FLIPPED)
    root = LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
    n = clean.lengths[0]
    heads = [
        Site("head", l, h, d, s)
        for l in range(model.n_layers)
        for h in range(model.n_heads)
        for d in range(n)
        for s in range(d + 1)
    ]
    mlps = [Site("mlp", l, dest=d) for l in range(model.n_layers) for d in range(n)]
    every, nothing, only_heads = patch_sets(
        clean, other, root, [heads + mlps, [], heads], mlps="patched", draws=0
    )
    assert every.patched == pytest.approx(every.other, abs=1e-4)
    assert every.kept == pytest.approx(every.clean, abs=1e-4)
    assert nothing.patched == pytest.approx(nothing.clean, abs=1e-4)
    assert nothing.kept == pytest.approx(nothing.other, abs=1e-4)
    assert only_heads.components == len(heads)
    live = patch_sets(clean, other, root, [heads], draws=0)[0]
    assert live.kept == pytest.approx(live.clean, abs=1e-4)
    assert live.sufficiency == pytest.approx(1, abs=1e-4)


def test_several_sets_in_one_call_and_alone_are_the_same(model: headtrace.Model) -> None:
    clean, other = model.record(MARY), model.record(FLIPPED)
    root = LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
    sets = [[Site("head", 2, 0, 14, 10)], [Site("head", 2, 1, 14, 10), Site("mlp", 1, dest=10)]]
    both = patch_sets(clean, other, root, sets, draws=3)
    for sites, together in zip(sets, both, strict=True):
        alone = patch_sets(clean, other, root, [sites], draws=0)[0]
        assert (alone.patched, alone.kept) == pytest.approx((together.patched, together.kept), abs=1e-4)
        assert len(together.random_patched) == len(together.random_kept) == 3
        assert abs(together.random_effect) < abs(together.effect)
    assert both == patch_sets(clean, other, root, sets, draws=3)


def test_flow_and_measurement_stand_side_by_side(report: headtrace.Report, tmp_path: Path) -> None:
    patches = report.patches
    assert report.verdict == "PASS"
    assert patches.correlation > 0.9
    assert 0 <= patches.residual < 0.2
    assert {group.name for group in patches.groups} >= {'heads from "to" 14 to "John" 10', "all heads"}
    assert all(abs(group.random) < abs(group.measured) for group in patches.groups)
    assert "to first order only" in report.summary()
    folder = report.save(tmp_path)
    data = json.loads((folder / "verification.json").read_text())
    assert data["patches"]["correlation"] == pytest.approx(patches.correlation)
    assert len(data["patches"]["nodes"]) == len(patches.nodes) == patches.frame().filter(what="node").height
    report.plot(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 1000


@pytest.mark.parametrize("field", ["flow", "moves", "attends", "other_attention", "spread"])
def test_a_wrong_number_of_a_node_is_found(model: headtrace.Model, circuit: Circuit, field: str) -> None:
    node = circuit.heads()[0]
    old = getattr(node, field)
    wrong = (old[0] - 0.1, old[1]) if field == "spread" else 0.9 * old
    nodes = tuple(replace(each, **{field: wrong}) if each is node else each for each in circuit.nodes)
    report = headtrace.verify(replace(circuit, nodes=nodes), model, edges="none")
    also = {"influence"} if field == "flow" else set()
    assert {failure.field.split("[")[0] for failure in report.failures} == {field, *also}


@pytest.mark.parametrize("field", ["weight", "flows", "logits"])
def test_a_wrong_number_of_an_edge_is_found(model: headtrace.Model, field: str) -> None:
    circuit = headtrace.Tracer(model).trace(
        MARY, answer=" Mary", wrong=" John", paths="difference", counterfactual=FLIPPED
    )
    edge = next(each for each in circuit.edges if getattr(each, field) is not None)
    old = getattr(edge, field)
    wrong = old + 0.1 if field == "weight" else (old[0] + 0.1, *old[1:])
    edges = tuple(replace(each, **{field: wrong}) if each is edge else each for each in circuit.edges)
    report = headtrace.verify(replace(circuit, edges=edges), model, edges="none")
    assert field in {failure.field for failure in report.failures}


@pytest.mark.parametrize("field", ["value", "other_value", "shown"])
def test_a_wrong_end_is_found(model: headtrace.Model, circuit: Circuit, field: str) -> None:
    said = replace(circuit.difference, **{field: getattr(circuit.difference, field) + 0.1})
    report = headtrace.verify(replace(circuit, difference=said), model, edges="none")
    assert f"difference.{field}" in {failure.field for failure in report.failures}


def test_bad_input_gets_one_clear_line(model: headtrace.Model) -> None:
    clean, other = model.record(MARY), model.record(FLIPPED)
    root = LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
    with pytest.raises(InputError, match="choose one of each"):
        patch_sets(model.record([MARY, MARY]), other, root, [[]])
    with pytest.raises(InputError, match="15 and 5 tokens"):
        patch_sets(clean, model.record("When Mary and John"), root, [[]])
    with pytest.raises(InputError, match="cannot be patched"):
        patch_sets(clean, other, root, [[Site("embedding", dest=3)]])
