"""A mechanism adds up, every badge is what an intervention by hand gives, and known circuits are told as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch

import headtrace
from headtrace.causal.changes import OtherRun, Patch
from headtrace.causal.execute import rerun
from headtrace.errors import InputError
from headtrace.mechanism import RULES, Facts, StepRule, fold_circuit, fold_flows
from headtrace.mechanism.evidence import MOST_PAIRS
from headtrace.mechanism.mechanism import mechanism_from_json
from headtrace.mechanism.rules import role, token_phrase
from headtrace.mechanism.steps import MLPS, MOST_STEPS
from headtrace.models.identities import tolerance_for
from headtrace.tracing import Tracer
from headtrace.vocabulary import ROOT, Site
from tests.tiny import NAMES, prompts, tiny_model, top_two
from tests.truth.known import KNOWN, Case

MARY = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def mechanism(model: headtrace.Model) -> headtrace.Mechanism:
    return headtrace.why(model, MARY, budget=60)


# -- it adds up ----------------------------------------------------------------------------------------------


def test_the_ledger_closes_and_its_steps_are_those_that_are_shown(mechanism: headtrace.Mechanism) -> None:
    compared = mechanism.circuit.difference
    assert compared is not None
    assert mechanism.whole == pytest.approx(compared.value - compared.other_value, rel=1e-5)
    assert sum(line.amount for line in mechanism.ledger) == pytest.approx(mechanism.whole, rel=1e-6)
    assert {line.step for line in mechanism.ledger} - {None} <= {step.id for step in mechanism.steps}
    for step in mechanism.steps:
        if step.heads:
            assert step.root == pytest.approx(sum(head.root for head in step.heads), abs=1e-6)


def test_what_is_shown_carries_most_of_the_difference(mechanism: headtrace.Mechanism) -> None:
    assert 0 < len(mechanism.steps) <= MOST_STEPS
    assert mechanism.shown >= 0.8
    assert mechanism.test is not None
    assert (
        mechanism.test.sufficiency
        > 0.5
        > (mechanism.test.random_kept - mechanism.test.other) / mechanism.whole
    )
    assert mechanism.test.necessity > 0.5


@pytest.mark.parametrize("family", NAMES)
def test_mlps_fold_exactly_in_every_family(family: str) -> None:
    """All heads and embeddings together bring into each reading what enters it (checked where it is computed), and the
    parts of the root's cut give the whole."""
    model = tiny_model(family, dtype=torch.float64)
    first, *_ = prompts()
    ids = list(first)
    other = [ids[0], *((each + 1) % model.d_vocab for each in ids[1:])]
    answer, wrong = top_two(model, ids)
    flows = Tracer(model).difference_flows(ids, answer, wrong, root="linear", counterfactual=other)
    backbone = fold_flows(flows)
    flow, whole = flows[0].flow, flows[0].value - flows[0].other_value
    direct = {
        edge.source: edge.flow for edge in flow.edges(0, ROOT, strongest=10**6) if edge.source.kind == "head"
    }
    mlps = sum(e.flow for e in flow.edges(0, ROOT, strongest=10**6) if e.source.kind == "mlp")
    size = abs(whole) + sum(abs(each) for each in direct.values())
    allowed = tolerance_for(torch.float64) * size
    assert backbone.mlps_into_root == pytest.approx(mlps, abs=allowed)
    for site, amount in backbone.direct.items():
        assert amount == pytest.approx(direct.get(site, 0.0), abs=allowed)
    assert sum(backbone.direct.values()) + backbone.mlps_into_root + backbone.rest == pytest.approx(
        whole, abs=allowed
    )


@pytest.mark.parametrize(
    ("prompt", "answer", "wrong"),
    [
        ("While Amy and Anne were busy at the office, Anne passed a guitar to", " Amy", " Anne"),
        (
            "While Jennifer and Helen were walking to the store, Jennifer gave a book to",
            " Helen",
            " Jennifer",
        ),
    ],
)
def test_readings_that_take_next_to_nothing_are_no_failure(
    model: headtrace.Model, prompt: str, answer: str, wrong: str
) -> None:
    """Of large parts that cancel, rounding is left: it is judged by the size of what was added up."""
    found = headtrace.why(model, prompt, answer, wrong, measure=False)
    assert sum(line.amount for line in found.ledger) == pytest.approx(found.whole, rel=1e-6)


def test_a_folded_flow_is_the_sum_over_all_paths_through_mlps(model: headtrace.Model) -> None:
    """Against the edges of the unfolded flow: straight, and through one MLP, two, ... at the same token."""
    (pair,) = Tracer(model).difference_flows(MARY, " Mary", " John", counterfactual=OTHER)
    backbone = fold_flows([pair])
    flow = pair.flow
    source, target, side = max(backbone.edges, key=lambda ends: abs(backbone.edges[ends].flow))
    read = [
        each for each in flow.reads(0, target) if each.side == side and each.place.position == source.dest
    ]
    (write,) = flow.differences(0, [source])
    straight = sum(float(write @ each.multiplier) for each in read)
    assert backbone.edges[source, target, side].direct == pytest.approx(straight, abs=1e-4)


# -- it is measured ------------------------------------------------------------------------------------------


def test_every_badge_is_what_an_intervention_by_hand_gives(
    model: headtrace.Model, mechanism: headtrace.Mechanism
) -> None:
    compared = mechanism.circuit.difference
    assert compared is not None
    n = len(compared.prompts)
    chosen = [compared.prompts[i * n // MOST_PAIRS] for i in range(min(MOST_PAIRS, n))]
    clean = model.record([list(mechanism.circuit.prompt.token_ids)])
    answer, wrong = model.token_id(" Mary"), model.token_id(" John")
    for step in mechanism.steps:
        sites = [head.site for head in step.heads]
        if step.role == MLPS:
            first, last = step.layers or (0, model.n_layers - 1)
            sites = [Site("mlp", layer, dest=step.dest) for layer in range(first, last + 1)]
        values = []
        for prompt in chosen:
            source = OtherRun.of(model.record([list(prompt.token_ids)]))
            logits = rerun(clean, [Patch(source, tuple(sites))]).last_logits()
            values.append(float(logits[answer] - logits[wrong]))
        assert step.measured is not None
        assert step.measured.without == pytest.approx(fmean(values), abs=1e-3)
        assert step.measured.before == pytest.approx(compared.value, abs=1e-3)


def test_without_measuring_badges_are_hollow(model: headtrace.Model) -> None:
    found = headtrace.why(model, MARY, counterfactual=OTHER, measure=False)
    assert found.test is None
    assert all(step.measured is None for step in found.steps)
    assert "not measured" in found.summary()


# -- it is right where the truth is known --------------------------------------------------------------------


def first_case(name: str) -> tuple[headtrace.Model, Case]:
    known = KNOWN[name]
    (case,) = known.cases(1)
    return known.model, case


def test_induction_is_told_as_induction() -> None:
    model, case = first_case("induction")
    found = headtrace.why(model, list(case.ids), case.answer, case.wrong)
    truth = {edge.target for edge in case.truth if edge.target.kind == "head"}
    truth |= {edge.source for edge in case.truth if edge.source.kind == "head"}
    named = {head.site for step in found.steps for head in step.heads}
    assert named == truth
    roles = {head.layer: step.role for step in found.steps for head in step.heads}
    assert roles == {0: "previous", 1: "copies"}


def test_indirect_object_identification_is_told_in_its_order() -> None:
    model, case = first_case("indirect object")
    found = headtrace.why(model, list(case.ids), case.answer, case.wrong)
    steps = {head.name: step for step in found.steps for head in step.heads}
    assert set(steps) == {f"L{site.layer}H{site.head}" for site in _heads(case)}
    assert steps["L2H1"].role == "copies"
    order = [steps[name].stage for name in sorted(steps)]
    assert order == sorted(order)


def _heads(case: Case) -> set[Site]:
    ends = {edge.source for edge in case.truth} | {edge.target for edge in case.truth}
    return {site for site in ends if site.kind == "head"}


# -- rules ---------------------------------------------------------------------------------------------------

TOKENS = ("<s>", " When", " Mary", " and", " John", " met", ",", " John", " told")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"dest": 8, "src": 2, "flow": 2.0, "root": 2.0, "answer": (" Mary",)}, "copies"),
        ({"dest": 8, "src": 5, "flow": 2.0, "root": 2.0, "raises": (" met",)}, "copies"),
        ({"dest": 8, "src": 7, "flow": 2.0, "root": 2.0, "logits": (0.1, -1.9)}, "lowers"),
        ({"dest": 8, "src": 8, "flow": 2.0, "root": 2.0}, "passes on"),
        ({"dest": 8, "src": 5, "flow": 2.0, "root": 2.0}, "raises"),
        ({"dest": 8, "src": 2, "flow": -2.0, "root": -2.0}, "against"),
        ({"dest": 8, "src": 2, "flow": 2.0, "root": -0.4}, "carries"),
        ({"dest": 7, "src": 4, "flow": 1.0}, "finds"),
        ({"dest": 7, "src": 5, "flow": 1.0}, "induction"),
        ({"dest": 3, "src": 2, "flow": 1.0}, "previous"),
        ({"dest": 5, "src": 0, "flow": 1.0}, "first token"),
        ({"dest": 5, "src": 5, "flow": 1.0}, "itself"),
        ({"dest": 8, "src": 4, "flow": 1.0}, "carries"),
    ],
)
def test_rules_are_tried_in_order(facts: dict, expected: str) -> None:
    known = Facts(TOKENS, whole=10.0, **facts)
    assert role(known) == expected
    assert RULES[expected].words(known)


def test_a_change_against_the_answer_turns_the_signs() -> None:
    assert role(Facts(TOKENS, 8, 2, flow=-2.0, whole=-10.0, root=-2.0)) != "against"
    assert role(Facts(TOKENS, 8, 2, flow=2.0, whole=-10.0, root=2.0)) == "against"


def test_another_package_can_add_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = StepRule(
        5, lambda facts: facts.tokens[facts.src] == " met", lambda facts: "meets", "the token is met"
    )
    monkeypatch.setattr(RULES, "_known", {**RULES})
    RULES.add("meets", mine)
    assert role(Facts(TOKENS, 8, 5, flow=1.0, whole=10.0)) == "meets"


def test_repeated_tokens_are_counted_and_the_last_is_called_last() -> None:
    assert [token_phrase(TOKENS, i) for i in (4, 7, 8)] == ["the first *John*", "the second *John*", "*told*"]
    assert token_phrase((" to", " to"), 1) == "the last *to*"


# -- files and views -----------------------------------------------------------------------------------------


def test_a_mechanism_is_the_same_every_time_and_in_its_file(
    model: headtrace.Model, mechanism: headtrace.Mechanism, tmp_path
) -> None:
    again = headtrace.why(model, MARY, budget=60)
    assert again.sentence == mechanism.sentence
    assert headtrace.load_mechanism(mechanism.save(tmp_path / "m.json")) == mechanism
    renamed = mechanism.rename(1, "notices the name").hide(2)
    assert "notices the name" in renamed.summary()
    loaded = headtrace.load_mechanism(renamed.save(tmp_path / "n.json"))
    assert loaded == renamed
    assert [line.amount for line in loaded.ledger] == [line.amount for line in mechanism.ledger]


def test_merged_steps_carry_what_enters_both_from_outside(
    model: headtrace.Model, mechanism: headtrace.Mechanism, tmp_path
) -> None:
    """Against the folded flows themselves: a step's flow is the sum of its components' less what flows between them."""
    looking, copying = (
        next(step for step in mechanism.steps if step.role == role) for role in ("itself", "copies")
    )
    merged = mechanism.merge(looking.id, copying.id, "reads and copies")
    compared = mechanism.circuit.difference
    assert compared is not None
    flows = Tracer(model).difference_flows(
        MARY, " Mary", " John", counterfactual=tuple(list(each.token_ids) for each in compared.prompts)
    )
    backbone = fold_flows(flows)
    sites = {head.site for head in (*looking.heads, *copying.heads)}
    inside = sum(folded.flow for (a, b, _), folded in backbone.edges.items() if a in sites and b in sites)
    expected = sum(backbone.flows[site] for site in sites) - inside
    step = merged.step(looking.id)
    assert step.flow == pytest.approx(expected, rel=1e-4)
    assert step.flow < looking.flow + copying.flow, "one feeds the other"
    assert {head.site for head in step.heads} == sites
    assert step.measured is None
    assert sum(line.amount for line in merged.ledger) == pytest.approx(merged.whole, rel=1e-6)
    assert copying.id not in [each.id for each in merged.steps]
    assert not any(copying.id in (arrow.step, arrow.target) for arrow in merged.arrows)
    loaded = headtrace.load_mechanism(merged.save(tmp_path / "m.json"))
    assert loaded == merged
    assert "reads and copies" in loaded.sentence.lower()
    drawn = merged.to_svg()
    assert "reads and copies" in drawn.lower()
    with pytest.raises(InputError, match="itself"):
        mechanism.merge(1, 1)
    mlps = next(step.id for step in mechanism.steps if step.role == MLPS)
    with pytest.raises(InputError, match="MLPs"):
        mechanism.merge(1, mlps)


def test_a_damaged_file_is_refused_by_its_field(mechanism: headtrace.Mechanism, tmp_path) -> None:
    path = mechanism.save(tmp_path / "m.json")
    data = json.loads(path.read_text())
    for change, words in (
        ({"schema": "headtrace.mechanism/9"}, "schema"),
        ({"whole": data["whole"] + 1}, "ledger"),
        ({"arrows": [{**data["arrows"][0], "target": 99}]}, r"arrows\[0\]"),
        ({"steps": [{**data["steps"][0], "flow": "much"}]}, r"steps\[0\].flow"),
    ):
        with pytest.raises(InputError, match=words):
            mechanism_from_json(data | change)


def test_frames_have_a_row_each(mechanism: headtrace.Mechanism) -> None:
    assert mechanism.frame().height == len(mechanism.steps)
    assert mechanism.frame("heads").height == sum(len(step.heads) for step in mechanism.steps)
    assert mechanism.frame("arrows").height == len(mechanism.arrows)
    assert mechanism.frame("ledger")["amount"].sum() == pytest.approx(mechanism.whole, rel=1e-6)
    with pytest.raises(InputError, match="choose steps"):
        mechanism.frame("edges")


@pytest.mark.parametrize("paths", ["attention", "content", "complete", "difference"])
def test_every_kind_of_circuit_can_be_read(model: headtrace.Model, paths: str) -> None:
    request = {"text": MARY, "answer": " Mary", "wrong": " John", "paths": paths}
    circuit = Tracer(model).trace(request | ({"counterfactual": OTHER} if paths == "difference" else {}))
    found = circuit.mechanism()
    assert found.steps
    assert sum(line.amount for line in found.ledger) == pytest.approx(found.whole, rel=1e-6)
    if circuit.difference is not None:
        assert fold_circuit(circuit).whole == pytest.approx(circuit.difference.change)


def test_an_empty_circuit_says_why(model: headtrace.Model) -> None:
    circuit = Tracer(model).trace(MARY, " Mary", " John", paths="difference", counterfactual=OTHER)
    empty = replace(circuit, nodes=circuit.nodes[:1], edges=(), reason="nothing differs")
    assert empty.mechanism().sentence == "nothing differs"


def test_a_prompt_without_words_to_exchange_says_what_to_do(model: headtrace.Model) -> None:
    with pytest.raises(InputError, match="counterfactual"):
        headtrace.why(model, [0])


def test_the_drawing_shows_each_step_once_with_text_of_readable_size(mechanism: headtrace.Mechanism) -> None:
    import re

    drawn = mechanism.to_svg()
    cards = re.findall(r'class="card" data-step="(\d+)"', drawn)
    assert sorted(map(int, cards)) == [step.id for step in mechanism.steps]
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', drawn)) >= 11
