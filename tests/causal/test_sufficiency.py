"""Is a circuit enough: the ends of the curve, batches, gradients and areas are what they must be."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest
import torch

import headtrace
from headtrace.causal.changes import OtherRun
from headtrace.causal.execute import Changes
from headtrace.causal.patching import (
    PatchingCase,
    as_given,
    attribution_patching,
    by_attention,
    mask_gradients,
    mask_metric,
    measure,
    ranked_firings,
)
from headtrace.causal.sufficiency import SHARES, areas, open_case, shares_of, sizes, sufficiency
from headtrace.circuits import Node
from headtrace.errors import InputError, OutOfMemoryError
from headtrace.roots import Direction
from headtrace.vocabulary import Component, Firing
from tests.causal.traced import traced
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two

OTHER = prompts(9)[0]
"""A counterfactual prompt of the same length."""
F64 = torch.float64


def opened(name: str, dtype: torch.dtype = F64):
    model, circuit = traced(name, dtype)
    case, other = open_case(circuit, model, OTHER)
    return model, circuit, case, other


def allowed(case: PatchingCase) -> float:
    size = float(case.recording.logits.abs().max())
    return rounding(case.model.dtype, forward_terms(case.model), size)


@pytest.mark.parametrize("name", NAMES)
def test_everything_kept_is_the_model_and_nothing_kept_is_every_head_from_the_counterfactual(
    name: str,
) -> None:
    model, _, case, _ = opened(name)
    everything, nothing = measure([case.keeping(case.places), case.keeping(case.places[:0])])
    assert everything == pytest.approx(case.clean, abs=allowed(case))

    # Independently: attention writes, as they were recorded in the counterfactual run, put into the clean run.
    theirs = model.record([OTHER])
    weights = model.weights

    class Theirs(headtrace.models.Observer):
        def mix(self, call, pattern):
            values = theirs.values[call.layer].repeat_interleave(weights.group, dim=1)
            return theirs.patterns[call.layer] @ values

    reading = case.metric.reading()
    logits = model.run(case.recording.token_ids, Theirs(), reading)
    positions = list(case.metric.positions)
    assert nothing == pytest.approx(float(reading.value(logits[:, positions])), abs=allowed(case))
    assert abs(nothing - case.clean) > 100 * allowed(case)


def test_nothing_kept_is_not_the_counterfactual_since_embeddings_and_mlps_are_the_prompts_own() -> None:
    _, _, case, other = opened("llama")
    assert abs(measure([case.keeping(case.places[:0])])[0] - other) > 100 * allowed(case)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen2"])
def test_a_component_that_is_not_kept_writes_what_it_wrote_in_the_counterfactual_run(name: str) -> None:
    """At the end of the last layer nothing but the final MLP reads it; a parallel or a linear reading shows it."""
    model, _, case, _ = opened(name)
    layer, end = model.n_layers - 1, case.length - 1
    firing = Firing(layer, 1, end, 4)
    seen: dict[str, torch.Tensor] = {}

    class Watching(headtrace.models.Observer):
        def attention_write(self, layer_, write):
            if layer_ == layer:
                seen["write"] = write[0, end].clone()

    without = case.without(case.places_of([firing])).intervention
    model.run(case.recording.token_ids, Changes(model, case.length, [without]), Watching())
    mine, theirs = (
        recording.write(Component("head", layer, 1, src=4))[end]
        for recording in (case.recording, model.record([OTHER]))
    )
    whole = (
        sum(case.recording.write(Component("head", layer, head))[end] for head in range(model.n_heads))
        + case.recording.attention_bias(layer)[0, end]
    )
    torch.testing.assert_close(seen["write"], whole - mine + theirs, atol=1e-12, rtol=0)


def test_many_sets_and_prompts_at_once_are_what_each_is_alone() -> None:
    model, _, case, _ = opened("gemma2")
    ids = prompts(3)[0]
    more = headtrace.Tracer(model, tau=0.08).trace(ids, *top_two(model, ids), root="linear")
    cases = [case, open_case(more, model, OTHER)[0]]
    shorter = headtrace.Tracer(model, tau=0.08).trace(
        prompts(0)[1], *top_two(model, prompts(0)[1]), root="linear"
    )
    cases.append(open_case(shorter, model, prompts(4)[1])[0])
    copies = [
        (one, change(by_attention(one).first(size)))
        for size in (3, 40)
        for one in cases
        for change in (one.keeping, one.without)
    ]
    together = measure([copy for _, copy in copies])
    for (one, copy), value in zip(copies, together, strict=True):
        assert value == pytest.approx(measure([copy])[0], abs=allowed(one))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_mask_are_finite_differences(name: str) -> None:
    model, _, case, _ = opened(name)
    slopes = mask_gradients(case, [1.0]).flatten()
    chosen = slopes.abs().argsort(descending=True)[[0, 1, 5, 20, 60]].tolist()
    step = 1e-5
    masks = torch.ones(2 * len(chosen), *case.shape, dtype=F64)
    for row, place in enumerate(chosen):
        masks[2 * row].view(-1)[place] += step
        masks[2 * row + 1].view(-1)[place] -= step
    values = mask_metric(case, masks.unbind(1))
    measured = (values[0::2] - values[1::2]) / (2 * step)
    torch.testing.assert_close(measured, slopes[chosen], atol=1e-6, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in model.hf.parameters()), "the model is as it was"


def test_integrated_gradients_add_up_to_what_all_components_bring() -> None:
    _, _, case, _ = opened("llama")
    nothing, everything = measure([case.keeping(case.places[:0]), case.keeping(case.places)])
    points = 256
    total = float(mask_gradients(case, [(i + 0.5) / points for i in range(points)]).sum())
    assert total == pytest.approx(everything - nothing, rel=1e-3)


def test_gradients_can_be_taken_where_the_caller_has_switched_them_off() -> None:
    _, _, case, _ = opened("qwen3")
    expected = attribution_patching(case).places
    with torch.inference_mode():
        inside = PatchingCase(case.recording, case.metric, OtherRun.of(case.model.record([OTHER])))
        assert torch.equal(attribution_patching(inside).places, expected)
    with torch.no_grad():
        assert torch.equal(attribution_patching(case).places, expected)


def test_a_prompt_too_long_for_gradients_is_an_error_before_anything_runs(monkeypatch) -> None:
    model, circuit, *_ = opened("llama")
    monkeypatch.setattr("headtrace.causal.patching.available_bytes", lambda: 100_000)
    with pytest.raises(
        OutOfMemoryError, match=r"1,936 components of a prompt of 11 tokens.*Shorten the prompt"
    ):
        sufficiency(circuit, model, OTHER, baselines=["attribution patching"])


def test_areas_are_those_of_a_curve_drawn_by_hand() -> None:
    x, y = [0.1, 0.3, 1.0], [0.5, 1.5, 1.0]
    below, above = areas(x, y)
    assert below == pytest.approx(0.2 * 1.0 + 0.7 * 1.25)
    assert above == pytest.approx(0.2 * 0.5 + 0.7 * 0.25)
    assert areas(SHARES, [1.0] * 10) == pytest.approx((0.999, 0.0))
    assert shares_of(25_000) == [25, 50, 125, 250, 500, 1250, 2500, 5000, 12500, 25000]
    assert shares_of(300)[:3] == [1, 1, 2]
    assert [sizes(n) for n in (0, 1, 2, 3, 5, 6, 40, 41)] == [
        [], [1], [1, 2], [1, 2, 3], [1, 2, 5], [1, 2, 5, 6], [1, 2, 5, 10, 20, 40], [1, 2, 5, 10, 20, 40, 41],
    ]  # fmt: skip


def test_the_curve_is_the_metric_of_each_set_put_between_counterfactual_and_clean() -> None:
    model, circuit, case, other = opened("mistral")
    found = sufficiency(circuit, model, OTHER)
    order = ranked_firings(circuit)
    assert found.size == len(order) == len(circuit.heads())
    assert list(found.curve) == [0, *sizes(found.size)]
    for size in (0, 1, found.size):
        value = measure([case.keeping(case.places_of(order[:size]))])[0]
        assert found.curve[size] == pytest.approx((value - other) / (case.clean - other), abs=1e-9)
    assert found.sufficiency == found.curve[found.size] == found.at(found.size) == found.at(10**6)
    assert found.nothing == found.curve[0]
    shares = [(n, value) for n, value in found.kept.continued]
    assert [n for n, _ in shares] == shares_of(len(case.places))
    assert shares[-1][1] == pytest.approx(1, abs=1e-9)
    below, above = areas(SHARES, [value for _, value in shares])
    assert (found.cpr, found.cmd) == (below, above)
    size = next(n for n in range(3, found.size) if n not in found.curve)
    value = measure([case.keeping(case.places_of(order[:size]))])[0]
    assert found.at(size) == pytest.approx((value - other) / (case.clean - other), abs=1e-9)


def test_a_circuits_order_is_influence_and_is_continued_by_attention() -> None:
    _, circuit, case, _ = opened("mistral")
    ranking = as_given(case, circuit)
    heads = sorted(circuit.heads(), key=lambda n: (-(n.influence or 0), -(n.contribution or 0), n.id))
    firings = case.firings(ranking.places)
    assert firings[: ranking.own] == [node.site.firing for node in heads]
    assert len(set(firings)) == len(firings) == len(case.places)
    rest = [float(case.recording.patterns[f.layer, 0, f.head, f.dest, f.src]) for f in firings[ranking.own :]]
    assert rest == sorted(rest, reverse=True)
    assert all(bool(case.recording.visible[f.layer][0, f.dest, f.src]) for f in firings)


def test_necessity_takes_the_circuit_away_and_as_many_others_that_are_not_in_it() -> None:
    model, circuit, case, other = opened("qwen2")
    found = sufficiency(circuit, model, OTHER, draws=3)
    need = found.necessity
    mine = case.places_of(ranked_firings(circuit))
    assert need.without == pytest.approx(measure([case.without(mine)])[0], abs=1e-9)
    assert need.loss == pytest.approx((case.clean - need.without) / (case.clean - other))
    assert len(need.without_random) == len(need.without_attended) == 3
    assert need.random_loss == pytest.approx(
        (case.clean - sum(need.without_random) / 3) / (case.clean - other)
    )
    again = sufficiency(circuit, model, OTHER, draws=3)
    assert again.necessity == need


def test_specificity_takes_the_same_heads_away_from_every_prompt() -> None:
    model, circuit, case, _ = opened("qwen2")
    ids = prompts(0)[1]
    other = headtrace.Tracer(model, tau=0.08).trace(ids, *top_two(model, ids), root="linear")
    first = sufficiency(circuit, model, OTHER)
    second = sufficiency(other, model, prompts(4)[1])
    table = first.specificity(second)
    assert table.select("circuit", "prompt").rows() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    heads = {(n.layer, n.head) for n in circuit.heads()}
    assert table["heads"][0] == len(heads)
    places = [f for f in case.firings(case.places) if (f.layer, f.head) in heads]
    value = measure([case.without(case.places_of(places))])[0]
    assert table["metric"][0] == pytest.approx(value, abs=1e-9)
    elsewhere = sufficiency(circuit, tiny_model("qwen2", 0, F64), OTHER)
    with pytest.raises(InputError, match="same loaded model"):
        first.specificity(elsewhere)


def test_baselines_are_measured_alike_and_any_circuit_can_be_compared() -> None:
    model, circuit, _, _ = opened("llama")
    few = replace(
        circuit,
        nodes=tuple(n for n in circuit.nodes if n.kind == "root") + circuit.heads()[:3],
        edges=(),
    )
    found = sufficiency(
        circuit, model, OTHER, baselines=True, compare={"few": few, "one": ["L0H1:3:2"]}, draws=2
    )
    names = ["random", "attention", "attribution patching", "integrated gradients", "acc++", "few", "one"]
    assert list(found.compared) == names
    table = found.baselines
    assert table["ranking"].to_list() == ["circuit", *names]
    assert table.columns == ["ranking", "at 5", "at 10", "at 20", "at 40", "at own size", "cpr", "cmd"]
    assert not any(table.null_count().row(0)), "every size that is shown was measured"
    assert found.compared["acc++"].cpr == found.cpr, "this circuit is the attention circuit itself"
    assert found.compared["few"].own == 3
    assert found.compared["few"].at(40) == found.compared["few"].at(3)
    # What is ranked by its effect keeps more than what is drawn at random.
    best = table.filter(pl.col("ranking") == "integrated gradients")["at 10"][0]
    assert best > table.filter(pl.col("ranking") == "random")["at 10"][0] + 0.1


def test_a_list_of_components_can_stand_for_the_circuit() -> None:
    model, circuit, case, other = opened("llama")
    found = sufficiency(circuit, model, OTHER, ranking=["L3H0 10->4", Firing(2, 1, 10, 3), "L3H0:10:4"])
    assert found.size == 2
    value = measure([case.keeping(case.places_of([Firing(3, 0, 10, 4), Firing(2, 1, 10, 3)]))])[0]
    assert found.sufficiency == pytest.approx((value - other) / (case.clean - other), abs=1e-9)


def test_mean_and_zero_ablation_are_those_of_faithfulness() -> None:
    from headtrace.causal.faithfulness import faithfulness

    model, circuit, *_ = opened("qwen2")
    for ablation in ("mean", "zero"):
        found = sufficiency(circuit, model, ablation=ablation)
        known = faithfulness(circuit, model, ablation=ablation, controls=0)
        assert found.counterfactual == pytest.approx(known.empty, abs=1e-9)
        assert found.sufficiency == pytest.approx(known.faithfulness, abs=1e-9)
        assert found.nothing == pytest.approx(0, abs=1e-9)
        assert found.necessity.without == pytest.approx(known.without, abs=1e-9)


def test_every_kind_of_root_has_a_sufficiency() -> None:
    model, _ = traced("gemma2", F64)
    ids, tracer = prompts(0)[0], headtrace.Tracer(model, tau=0.08)
    direction = model.record(ids).residuals[3, 0, -1].tolist()
    for asked in (
        {"root": "probability", "answer": 5},
        {"root": "probability", "top_k": 3},
        {"root": "direction", "direction": direction, "layer": 3},
        {"heads": ["L3H1", "L2H0"]},
    ):
        circuit = tracer.trace(ids, **asked)
        found = sufficiency(circuit, model, OTHER, baselines=["attribution patching"])
        assert found.kept.continued[-1][1] == pytest.approx(1, abs=1e-8)
        assert found.metric == circuit.root.measure


def test_a_continuation_is_put_behind_the_counterfactual_as_it_is_behind_the_prompt() -> None:
    model = headtrace.load("builtin")
    text = "When Mary and John went to the store, John gave a drink"
    circuit = headtrace.Tracer(model).trace(text, answer=" to Mary")
    assert circuit.root.continuation
    other = text.replace("Mary", "Anna").replace("John", "Tom")
    found = sufficiency(circuit, model, other)
    ids = [*model.to_ids(other), *circuit.prompt.token_ids[-1:]]
    assert sufficiency(circuit, model, ids).curve == found.curve
    baseline = sufficiency(circuit, model, ids, baselines=["acc++"]).compared["acc++"]
    assert baseline.points[-1][1] == found.sufficiency


def test_text_is_read_with_a_beginning_as_the_circuits_own_text_was() -> None:
    model = headtrace.load("builtin")
    text = "When Mary and John went to the store, John gave a drink to"
    for bos in (True, False):
        circuit = headtrace.Tracer(model).trace(text, " Mary", " John", bos=bos)
        found = sufficiency(circuit, model, text.replace("John gave", "Tom gave"))
        assert found.case.length == len(model.to_ids(text, bos=bos))


def test_results_are_short_in_a_shell_readable_in_a_notebook_and_whole_in_a_file(tmp_path) -> None:
    model, circuit, *_ = opened("llama")
    found = sufficiency(circuit, model, OTHER, baselines=["random", "attention"])
    assert len(repr(found)) < 160
    assert f"{found.sufficiency:.3f}" in repr(found)
    shown = found._repr_html_()
    assert "<table>" in shown
    assert "attention" in shown
    found.save(tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "sufficiency.json").read_text())
    assert saved["curve"] == [{"components": n, "sufficiency": f} for n, f in found.curve.items()]
    assert (saved["cpr"], saved["cmd"]) == (found.cpr, found.cmd)
    assert saved["necessity"]["loss"] == found.necessity.loss
    assert set(saved["baselines"]) == {"random", "attention"}
    assert (tmp_path / "new" / "sufficiency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ill_typed
def test_what_cannot_be_measured_says_what_to_do() -> None:
    model, circuit, *_ = opened("llama")
    with pytest.raises(InputError, match=r"has 12 tokens .* and the circuit's prompt 11"):
        sufficiency(circuit, model, [*OTHER, 5])
    with pytest.raises(InputError, match="is the circuit's own prompt"):
        sufficiency(circuit, model, list(circuit.prompt.token_ids))
    with pytest.raises(InputError, match="'counterfactual', 'mean', 'zero'"):
        sufficiency(circuit, model, OTHER, ablation="resample")
    with pytest.raises(InputError, match="Give a counterfactual prompt"):
        sufficiency(circuit, model)
    with pytest.raises(InputError, match="makes no use of a counterfactual"):
        sufficiency(circuit, model, OTHER, ablation="mean")
    empty = replace(circuit, nodes=(Node(0, "root"),), edges=(), reason="nothing speaks for it")
    with pytest.raises(InputError, match=r"no heads \(nothing speaks for it\).*ranking="):
        sufficiency(empty, model, OTHER)
    with pytest.raises(InputError, match="no baseline 'atention'"):
        sufficiency(circuit, model, OTHER, baselines=["atention"])
    with pytest.raises(InputError, match="does not see position 7"):
        sufficiency(circuit, model, OTHER, ranking=["L1H1:4:7"])
    with pytest.raises(InputError, match="at least once"):
        sufficiency(circuit, model, OTHER, draws=0)
    with pytest.raises(InputError, match="Trace it again"):
        sufficiency(replace(circuit, root=Direction(layer=2)), model, OTHER)


def test_a_counterfactual_that_changes_nothing_is_refused_not_divided_by() -> None:
    """A change behind the position that the metric is read at, which nothing there can see."""
    model, circuit = traced("llama")
    last = list(circuit.prompt.token_ids)
    vector = tuple([1.0] * 32)
    early = replace(circuit, root=Direction(layer=2, position=4, vector=vector))
    with pytest.raises(InputError, match=r"within rounding.*changes the answer"):
        sufficiency(early, model, [*last[:-1], last[-1] + 1])


def test_another_models_circuit_is_refused() -> None:
    _, circuit = traced("llama")
    with pytest.raises(InputError, match="own model"):
        sufficiency(circuit, tiny_model("llama", seed=5), OTHER)


def test_a_summary_warns_where_the_two_runs_hardly_differ() -> None:
    model, circuit, *_ = opened("llama")
    found = sufficiency(circuit, model, OTHER)
    assert "hardly differ" not in replace(found, clean=2.0, counterfactual=1.0).summary()
    assert "hardly differ" in replace(found, clean=2.0, counterfactual=1.9).summary()
    assert "with nothing kept (zero ablation)" in replace(found, ablation="zero").summary()
