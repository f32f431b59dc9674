"""What a verification says: a verdict, the tolerance it rests on, and every number that the model contradicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headtrace
from headtrace.causal.claims import SideClaim, _removed_in_order, removal_weights
from headtrace.causal.opening import Tolerance
from headtrace.causal.report import overall
from headtrace.circuits import MethodInfo, load_circuit
from headtrace.errors import InputError
from headtrace.roots import Direction, Heads
from tests.causal.traced import traced
from tests.conftest import IOI
from tests.tiny import tiny_model

DATA = Path(__file__).parent.parent / "circuits" / "data"


@pytest.fixture(scope="module")
def builtin():
    model = headtrace.load("builtin")
    return model, headtrace.Tracer(model).trace(IOI, answer=" Mary", wrong=" John")


def with_node(circuit, node, **changes):
    return replace(
        circuit, nodes=tuple(replace(n, **changes) if n.id == node.id else n for n in circuit.nodes)
    )


def verified(circuit, model, **how):
    return headtrace.verify(circuit, model, **{"edges": "none", **how})


# -- verdicts ------------------------------------------------------------------------------------------------


def test_a_true_circuit_passes_and_says_on_what_grounds(builtin) -> None:
    model, circuit = builtin
    report = verified(circuit, model)
    assert report.verdict == "PASS"
    assert report.failures == ()
    assert report.summary().startswith(f"PASS: numbers reproduce: {len(report.predictions)} predictions hold")
    assert "eps of float32 x sqrt of 2,528 rounded sums" in report.summary()
    for field in (
        "attention",
        "weight",
        "influence",
        "predicted.query",
        "root.value",
        "prompt.tokens",
        "threshold",
    ):
        assert report.checked[field] > 0, field
    assert all(c.error <= c.allowed for c in report.predictions)


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("attention", lambda c, n: with_node(c, n, attention=n.attention - 0.01)),
        ("predicted.key", lambda c, n: with_node(c, n, predicted={**n.predicted, "key": 0.4})),
        ("influence", lambda c, n: with_node(c, n, influence=n.influence + 0.01)),
        ("threshold", lambda c, n: with_node(c, n, threshold=0.5)),
        ("explained", lambda c, n: with_node(c, n, explained=False)),
        ("expanded", lambda c, n: with_node(c, n, expanded=False)),
        ("root.value", lambda c, n: replace(c, root=replace(c.root, value=c.root.value + 0.01))),
        ("root.bias", lambda c, n: replace(c, root=replace(c.root, bias=1.0))),
        ("root.position", lambda c, n: replace(c, root=replace(c.root, position=3))),
        ("root.answer_tokens[0]", lambda c, n: replace(c, root=replace(c.root, answer_tokens=("John",)))),
        ("influence_kept", lambda c, n: replace(c, influence_kept=0.9)),
        ("method.tau", lambda c, n: replace(c, method=replace(c.method, tau="min(1, 3 / visible keys)"))),
        ("max_firings", lambda c, n: replace(c, method=replace(c.method, settings={"max_firings": 1}))),
        ("model.architecture", lambda c, n: replace(c, model=replace(c.model, architecture="llama"))),
        ("prompt.text", lambda c, n: replace(c, prompt=replace(c.prompt, text=IOI.replace("drink", "book")))),
    ],
)
def test_every_falsified_number_fails_and_is_named(builtin, field: str, lie) -> None:
    model, circuit = builtin
    node = next(n for n in circuit.nodes if n.expanded)
    report = verified(lie(circuit, node), model)
    assert report.verdict == "FAIL"
    assert field in {failure.field for failure in report.failures}


def test_a_failure_names_field_place_and_both_values(builtin) -> None:
    model, circuit = builtin
    node = next(n for n in circuit.nodes if n.expanded)
    (failure,) = verified(with_node(circuit, node, attention=0.25), model).failures
    assert (failure.field, failure.where, failure.in_file) == ("attention", node.name, 0.25)
    assert failure.measured == pytest.approx(node.attention, abs=failure.allowed)
    assert str(failure).startswith(
        f"attention of {node.name}: 0.25 in the file, {node.attention:.6g} in the model"
    )


@pytest.mark.parametrize("side", ["query", "key", "root"])
def test_weights_of_every_side_are_checked(builtin, side: str) -> None:
    model, circuit = builtin
    edge = next(e for e in circuit.edges if e.side == side)
    lying = circuit.with_edges(
        tuple(replace(e, weight=e.weight + 0.01) if e == edge else e for e in circuit.edges)
    )
    failures = {failure.field: failure for failure in verified(lying, model).failures}
    assert failures["weight"].in_file == pytest.approx(failures["weight"].measured + 0.01, abs=1e-3)
    assert circuit.node(edge.source).name in failures["weight"].where


def test_a_component_at_another_position_than_its_reader_looks_at_is_found(builtin) -> None:
    """A signal is computed from the component alone: only its place says at which token it was."""
    model, circuit = builtin
    edge = next(e for e in circuit.edges if e.side == "key" and circuit.node(e.source).kind == "mlp")
    source = circuit.node(edge.source)
    free = next(
        p for p in range(14) if p != source.dest and f"MLP {source.layer} @{p}" not in circuit._by_name
    )
    report = verified(with_node(circuit, source, dest=free), model)
    assert "position of the source" in {failure.field for failure in report.failures}


def test_falsified_channels_fail(builtin) -> None:
    model, circuit = builtin
    edge = circuit.top(1)[0]
    other = tuple(k for k in range(model.d_head) if k not in edge.channels)[:1]
    lying = circuit.with_edges(tuple(replace(e, channels=other) if e == edge else e for e in circuit.edges))
    assert {"weight", f"predicted.{edge.side}"} <= {f.field for f in verified(lying, model).failures}


def test_a_circuit_without_predictions_is_not_a_pass(builtin) -> None:
    model, _ = builtin
    svt = headtrace.Tracer(model, method="svt").trace(IOI, answer=" Mary", wrong=" John")
    empty = headtrace.Tracer(model).trace(IOI, answer=" John", wrong=" Mary")
    assert svt.edges
    assert not empty.edges
    for one, reason in ((svt, "'svt' predicts no attention"), (empty, "there is no circuit")):
        report = verified(one, model)
        assert report.verdict == "NOTHING TO VERIFY"
        assert reason in report.summary()
        lying = replace(one, root=replace(one.root, value=one.root.value + 1))
        assert verified(lying, model).verdict == "FAIL", "what the file says is compared all the same"


def test_many_verdicts_make_one() -> None:
    assert overall(["PASS", "FAIL", "NOTHING TO VERIFY"]) == "FAIL"
    assert overall(["NOTHING TO VERIFY", "PASS"]) == "PASS"
    assert overall(["NOTHING TO VERIFY"]) == overall([]) == "NOTHING TO VERIFY"


def test_files_of_version_1_pass_on_the_model_they_were_traced_on(builtin) -> None:
    model, _ = builtin
    verdicts = {
        path.stem: verified(load_circuit(path), model).verdict for path in sorted(DATA.glob("*-1.json"))
    }
    assert verdicts.pop("empty-1") == "NOTHING TO VERIFY"
    assert set(verdicts.values()) == {"PASS"}


def test_a_contrast_of_version_0_2_passes_and_says_what_is_not_checked(builtin) -> None:
    """Its weights are differences from a counterfactual prompt; its contributions are those of any content."""
    model, _ = builtin
    circuit = load_circuit(DATA / "contrast-2.json")
    report = verified(circuit, model)
    assert not report.failures
    assert report.checked["contribution"] > 20
    assert any("contrast" in what for what in report.not_checked)
    node = next(node for node in circuit.nodes if node.kind == "mlp")
    lying = with_node(circuit, node, contribution=node.contribution + 0.1)
    assert {failure.field for failure in verified(lying, model).failures} == {"contribution"}


@pytest.mark.parametrize("tau", [None, 0.3])
def test_firings_of_layer_0_are_judged_by_the_version_that_traced_them(builtin, tau: float | None) -> None:
    """Up to 0.2 they were left as they were; a file that expands some is of a later one."""
    model, _ = builtin
    circuit = headtrace.Tracer(model, tau=tau).trace(IOI, answer=" Mary", wrong=" John")
    assert any(node.expanded for node in circuit.heads() if node.layer == 0)
    first = next(node for node in circuit.heads() if node.layer == 0 and node.expanded)
    into = [edge for edge in circuit.edges if edge.target == first.id]
    cut = circuit.with_edges(tuple(edge for edge in circuit.edges if edge not in into))
    cut = with_node(cut, first, expanded=False, predicted=None, elsewhere=None)
    assert "expanded" in {failure.field for failure in verified(cut, model).failures}


def test_a_method_that_is_not_known_is_said_to_be_unchecked(builtin) -> None:
    model, circuit = builtin
    report = verified(replace(circuit, method=MethodInfo("someone's own")), model)
    assert report.verdict == "PASS"
    assert any("someone's own" in what for what in report.not_checked)
    node = next(n for n in circuit.nodes if n.expanded)
    lying = with_node(replace(circuit, method=MethodInfo("someone's own")), node, attention=0.2)
    assert verified(lying, model).verdict == "FAIL"


def test_a_threshold_of_the_users_own_is_removed_in_order_from_the_nodes() -> None:
    model = headtrace.load("builtin")
    tracer = headtrace.Tracer(model, tau=lambda keys: 0.11 if keys > 9 else 0.3)
    circuit = tracer.trace(IOI, answer=" Mary", wrong=" John")
    report = verified(circuit, model)
    assert report.verdict == "PASS"
    assert any("custom" in what for what in report.not_checked)
    node = next(n for n in circuit.nodes if n.expanded)
    assert verified(with_node(circuit, node, threshold=0.9999999), model).verdict == "FAIL"


def test_whether_a_circuit_is_enough_stands_beside_the_verdict(builtin) -> None:
    model, circuit = builtin
    report = verified(circuit, model)
    assert report.verdict == "PASS"
    assert "Enough: not tested (no counterfactual)" in report.summary().splitlines()
    other = "When Anna and Tom went to the store, Emma gave a drink to"
    report = verified(circuit, model, counterfactual=other)
    whole = headtrace.sufficiency(circuit, model, counterfactual=other)
    assert report.enough.kept == pytest.approx(whole.sufficiency, abs=1e-4)
    line = f"Enough: {whole.sufficiency:.2f} of the difference kept against {other!r}"
    assert line in report.summary().splitlines()
    assert report.to_dict()["enough"] == {
        "kept": report.enough.kept,
        "counterfactual": other,
        "reason": None,
    }
    with pytest.raises(InputError, match="tokens"):
        verified(circuit, model, counterfactual="When Anna")


def test_a_difference_circuit_is_tested_against_its_own_prompt(builtin) -> None:
    model, _ = builtin
    other = IOI.replace("John gave", "Mary gave")
    circuit = headtrace.Tracer(model).trace(IOI, " Mary", " John", paths="difference", counterfactual=other)
    report = verified(circuit, model)
    assert report.verdict == "PASS"
    assert report.checked["flow"] == len(circuit.nodes)
    assert report.enough.kept is not None
    lying = replace(circuit, difference=replace(circuit.difference, other_value=0.0))
    assert "difference.other_value" in {failure.field for failure in verified(lying, model).failures}


# -- tolerance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traced_in", "run_in", "verdict"),
    [("float32", "float64", "OTHER PRECISION"), ("float64", "float32", "PASS")],
)
def test_the_tolerance_is_that_of_the_model_which_is_run(traced_in: str, run_in: str, verdict: str) -> None:
    there, here = (headtrace.load("builtin", dtype=dtype) for dtype in (traced_in, run_in))
    circuit = headtrace.Tracer(there).trace(IOI, answer=" Mary", wrong=" John")
    report = verified(circuit, here)
    assert report.verdict == verdict, report.summary()
    assert report.tolerance.precision == run_in
    node = next(n for n in circuit.nodes if n.expanded)
    assert verified(with_node(circuit, node, attention=node.attention - 0.01), here).verdict == "FAIL"


@pytest.mark.parametrize("stated", ["bfloat16", "float16"])
def test_a_file_cannot_choose_its_own_tolerance(builtin, stated: str) -> None:
    """`dtype: bfloat16` in the settings of a float32 circuit, the root 5 % larger, every prediction 0.1 higher."""
    model, circuit = builtin
    coarse = replace(
        circuit, method=replace(circuit.method, settings={**circuit.method.settings, "dtype": stated})
    )
    assert verified(coarse, model).verdict == "OTHER PRECISION", "true numbers, and still no PASS"
    nodes = [
        replace(n, predicted={k: min(1.0, v + 0.1) for k, v in n.predicted.items()}) if n.predicted else n
        for n in coarse.nodes
    ]
    lying = replace(coarse, nodes=tuple(nodes), root=replace(coarse.root, value=1.05 * coarse.root.value))
    report = verified(lying, model)
    assert report.verdict != "PASS"
    assert report.tolerance.precision == "float32"
    assert {"root.value", "predicted.query"} <= {failure.field for failure in report.failures}


def test_a_file_made_in_half_precision_has_a_verdict_of_its_own(builtin) -> None:
    """Attention and the root as the model gives them in bfloat16; what is false is beyond what that can explain."""
    model, circuit = builtin
    half = headtrace.load("builtin").hf.to(torch.bfloat16)
    half.set_attn_implementation("eager")
    ids = torch.tensor([circuit.prompt.token_ids])
    with torch.inference_mode():
        run = half(ids, output_attentions=True)
    logits, patterns = run.logits[0, -1].float(), torch.stack(run.attentions)[:, 0].float()
    value = float(logits[circuit.root.answer[0]] - logits[circuit.root.wrong[0]])
    attention = {n.id: float(patterns[n.layer, n.head, n.dest, n.src]) for n in circuit.heads()}
    nodes = tuple(replace(n, attention=attention[n.id]) if n.id in attention else n for n in circuit.nodes)
    coarse = replace(circuit, nodes=nodes, root=replace(circuit.root, value=value))
    assert verified(coarse, model).verdict == "FAIL", "without a word of its precision"
    coarse = replace(
        coarse, method=replace(coarse.method, settings={**coarse.method.settings, "dtype": "bfloat16"})
    )
    report = verified(coarse, model)
    assert (report.tolerance.precision, report.coarser.precision) == ("float32", "bfloat16")
    assert report.verdict == "OTHER PRECISION", report.summary()
    assert any(abs(attention[n.id] - n.attention) > 1e-3 for n in circuit.heads()), "float32 would refuse it"
    node = next(n for n in coarse.nodes if n.expanded)
    assert verified(with_node(coarse, node, attention=0.0078125), model).verdict == "FAIL"


def test_the_tolerance_grows_with_the_model_and_with_what_is_added_up() -> None:
    small, large = (Tolerance.of(tiny_model("llama", num_hidden_layers=n)) for n in (2, 8))
    assert small.relative < large.relative < 1e-4
    assert large.attention(40.0) == 40 * large.attention(1.0)
    own = Tolerance.of(tiny_model("llama"))
    assert own.relative == pytest.approx(2 * torch.finfo(torch.float32).eps * own.terms**0.5)


def test_weights_may_be_those_of_another_order_where_rounding_decides_the_order() -> None:
    model, circuit = traced("llama", torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    node = max((n for n in circuit.nodes if n.expanded), key=lambda n: len(circuit.edges_into(n)))
    claim = SideClaim.of(recording, circuit, node, "query")
    assert len(claim.signals) > 2
    reverse = _removed_in_order(claim, torch.arange(claim.claimed.shape[1], dtype=torch.float64))
    parts = zip(claim.parts, reverse.tolist(), strict=True)
    claim = replace(claim, parts=tuple(replace(part, weight=weight) for part, weight in parts))
    exact = removal_weights(claim, Tolerance("float64", 1, 1e-12))
    assert float((exact.high - exact.low).max()) < 1e-9, "no order is in doubt"
    assert float((exact.low - reverse).abs().max()) > 1e-3, "and the order matters"
    apart = float((exact.low - reverse).abs().max())
    coarse = Tolerance("float64", 1, 0.9 * apart / max(1.0, claim.size))
    unsure = removal_weights(claim, coarse)
    assert unsure.allowed < apart
    assert float((unsure.high - unsure.low).max()) > 1e-6, "orders that rounding could have made are tried"


@pytest.mark.slow
def test_circuits_of_another_cpu_pass(builtin, tmp_path) -> None:
    """Sums come out differently with other vector instructions; what is discrete may, too."""
    code = (
        "import sys, headtrace\n"
        "model = headtrace.load('builtin')\n"
        "for method in ('acc++', 'acc', 'svt'):\n"
        f"    circuit = headtrace.Tracer(model, method=method).trace({IOI!r}, answer=' Mary')\n"
        "    circuit.save(f'{sys.argv[1]}/{method}.json')\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment)
    model, _ = builtin
    verdicts = [
        verified(load_circuit(tmp_path / f"{name}.json"), model).verdict for name in ("acc++", "acc", "svt")
    ]
    assert verdicts == ["PASS", "PASS", "NOTHING TO VERIFY"]


# -- places --------------------------------------------------------------------------------------------------


def _changed(circuit, part: str, index: int, **changes):
    items = list(getattr(circuit, part))
    items[index] = replace(items[index], **changes)
    return replace(circuit, **{part: tuple(items)})


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda c: _changed(c, "nodes", 1, layer=999), r"nodes\[1\].layer: expected 0 to 2 .*got 999"),
        (lambda c: _changed(c, "nodes", 1, head=99), r"nodes\[1\].head: expected 0 to 3"),
        (
            lambda c: replace(c, prompt=replace(c.prompt, token_ids=(10**9, *c.prompt.token_ids[1:]))),
            r"prompt.token_ids\[0\]: expected 0 to .*token ids.*got 1000000000",
        ),
        (lambda c: replace(c, root=replace(c.root, answer=(10**9,))), r"root.answer\[0\]: expected 0 to"),
        (lambda c: _changed(c, "edges", -1, channels=(0, 64)), r"channels\[1\]: expected 0 to 31"),
        (lambda c: replace(c, root=Heads(("L0H0", "L9H0"))), r"root.heads\[1\]: expected 0 to 2"),
        (lambda c: replace(c, root=Direction(layer=4)), r"root.layer: expected 0 to 3"),
        (lambda c: replace(c, root=Direction(layer=1, vector=(1.0,))), r"root.vector: expected 128 numbers"),
        (lambda c: replace(c, method=replace(c.method, tau=7.0)), "method: tau=7.0"),
        (lambda c: replace(c, method=replace(c.method, ig_steps=10**12)), "method.ig_steps: expected fewer"),
    ],
)
def test_places_outside_the_model_are_refused_before_anything_runs(
    builtin, monkeypatch, lie, message
) -> None:
    model, circuit = builtin
    monkeypatch.setattr(type(model.hf), "forward", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(InputError, match=message):
        verified(lie(circuit), model)


# -- effects in the file -------------------------------------------------------------------------------------


def test_effects_that_a_file_holds_are_compared_with_what_is_measured() -> None:
    model, circuit = traced("llama", torch.float64)
    how = {"edges": "top:3", "controls": 0}
    once = headtrace.verify(circuit, model, **how).annotated()
    again = headtrace.verify(once, model, **how)
    assert again.verdict == "PASS"
    assert again.checked["effect.attention"] == 3
    edge = next(e for e in once.edges if e.effect)
    for name in ("attention", "boost_metric", "cosine"):
        lie = {**edge.effect, name: edge.effect[name] + 0.01}
        lying = once.with_edges(tuple(replace(e, effect=lie) if e == edge else e for e in once.edges))
        assert [f.field for f in headtrace.verify(lying, model, **how).failures] == [f"effect.{name}"]
    other = headtrace.verify(once, model, **how, reach="global")
    assert other.verdict == "PASS"
    assert any("another reach" in what for what in other.not_checked)


# -- what is kept and shown ----------------------------------------------------------------------------------


def test_verdict_tolerance_and_failures_are_saved(builtin, tmp_path) -> None:
    model, circuit = builtin
    node = next(n for n in circuit.nodes if n.expanded)
    report = verified(with_node(circuit, node, attention=0.25), model)
    report.save(tmp_path)
    kept = json.loads((tmp_path / "verification.json").read_text())
    assert kept["verdict"] == "FAIL"
    assert kept["tolerance"]["precision"] == "float32"
    assert kept["failures"] == [
        {
            "field": "attention",
            "where": node.name,
            "in_file": 0.25,
            "measured": report.failures[0].measured,
            "allowed": report.failures[0].allowed,
        }
    ]


def test_results_are_short_in_a_notebook(builtin) -> None:
    from headtrace.causal import intervene
    from headtrace.causal.experiments import edge_pairs, edges_into_head, residual_changes, single_edges
    from headtrace.causal.faithfulness import faithfulness

    model, circuit = builtin
    report = headtrace.verify(circuit, model, edges="top:3", controls=1)
    predictions = sum(len(node.predicted or {}) for node in circuit.nodes)
    assert predictions > 12  # also those of layer 0
    assert repr(report).startswith(f"Report(PASS: 0 failures, {predictions} predictions")
    edge = circuit.top(1)[0]
    results = [
        report,
        intervene(circuit, model, edge),
        faithfulness(circuit, model, controls=1),
        single_edges(circuit, model, edges="top:2", controls=1),
        edges_into_head(circuit, model, circuit.node(edge.target).name),
        edge_pairs(circuit, model, pairs=2),
        residual_changes(circuit, model),
    ]
    for result in results:
        assert len(repr(result)) < 300, type(result)
        page = result._repr_html_()
        assert "<table>" in page
        assert len(page) < 60_000
    injected = replace(circuit, method=replace(circuit.method, name="<script>"))
    assert "<script>" not in verified(replace(injected, edges=(), nodes=()), model)._repr_html_()
