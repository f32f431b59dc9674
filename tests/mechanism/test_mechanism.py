"""A mechanism adds up, every badge is what an intervention by hand gives, and known circuits are told as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
import torch

import headtrace
from headtrace.causal.changes import OtherRun, Patch
from headtrace.causal.execute import rerun
from headtrace.errors import InputError
from headtrace.mechanism import RULES, Facts, StepRule, fold_circuit, fold_flows
from headtrace.mechanism.drawing import LEFT_TO_RIGHT, involved_tokens, natural_width, text_width
from headtrace.mechanism.evidence import MOST_PAIRS, _other_mlps, measured_pairs
from headtrace.mechanism.mechanism import mechanism_from_json
from headtrace.mechanism.parts import StepMeasurement
from headtrace.mechanism.rules import LOOKING, MLPS, role, token_phrase
from headtrace.mechanism.steps import MOST_STEPS
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


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        # L23H0 of SmolLM2 raises *France* among others, but what it brings to the answer is *Paris*.
        ({"src": 4, "raises": (" France",), "logits": (1.5, -0.2)}, "*is* reads *France* and raises *Paris*"),
        (
            {"src": 4, "raises": (" France",), "logits": (0.2, -1.5)},
            "*is* reads *France* and lowers *London*",
        ),
        ({"src": 4, "raises": (" France",)}, "*is* reads *France* and raises *Paris*"),
        ({"src": 1, "raises": (" Paris",), "logits": (0.2, -1.5)}, "*is* copies *Paris*"),
        ({"src": 1, "logits": (1.5, -0.2)}, "*is* copies *Paris*"),
        ({"src": 1, "raises": (" Paris",), "logits": (-0.2, -1.5)}, "*is* reads *Paris* and lowers *London*"),
        ({"src": 4, "raises": (" France",), "answer": (), "wrong": ()}, "*is* copies *France*"),
    ],
)
def test_a_head_copies_only_the_token_that_it_raises(facts: dict, words: str) -> None:
    given = {"answer": (" Paris",), "wrong": (" London",)} | facts
    known = Facts(("<s>", " Paris", ":", " of", " France", " is"), 5, flow=2.0, whole=10.0, root=2.0, **given)
    assert RULES[role(known)].words(known) == words


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"flow": 2.0, "logits": (1.9, -0.1)}, "*told* reads *met* and raises the answers"),
        ({"flow": 2.0, "logits": (0.1, -1.9)}, "*told* reads *met* and lowers the wrong answers"),
        ({"flow": -2.0, "logits": (-1.0, 1.0)}, "works against the answers at *told*"),
        ({"flow": 2.0, "logits": (0.1, -1.9), "wrong": (" 1", "1")}, "*told* reads *met* and lowers *1*"),
    ],
)
def test_of_several_answers_no_one_is_named(facts: dict, words: str) -> None:
    given = {"answer": ("6", "7"), "wrong": ("0", "1")} | facts
    known = Facts(TOKENS, 8, 5, whole=10.0, root=facts["flow"], **given)
    assert RULES[role(known)].words(known) == words


def test_a_head_on_its_own_position_re_encodes_its_token() -> None:
    known = Facts(TOKENS, 5, 5, flow=1.0, whole=10.0)
    assert RULES[role(known)].words(known) == "*met* is re-encoded in place"


def test_a_head_that_takes_back_less_than_it_passes_on_does_not_speak_to_the_answer() -> None:
    known = Facts(TOKENS, 8, 7, flow=0.76, whole=3.6, root=-0.67)
    assert role(known) == "previous", "against the answer is what has a flow against it"
    assert role(replace(known, flow=-0.76)) == "against"


@pytest.mark.parametrize(("src", "words"), [(5, "reads *met*"), (8, "reads its own position")])
def test_a_head_reads_another_token_or_its_own_position(src: int, words: str) -> None:
    known = Facts(TOKENS, 8, src, 2.0, 10.0, 2.0, logits=(0.1, -1.9), answer=(" Mary",), wrong=("\n",))
    assert RULES[role(known)].words(known) == f"*told* {words} and lowers *⏎*"


def test_a_prompt_of_one_token_says_what_to_do() -> None:
    found = headtrace.why(headtrace.load("builtin"), [5], answer=6, wrong=7, budget=20)
    assert not found.steps
    assert "longer prompt" in found.sentence


def test_steps_that_cancel_are_no_explanation(mechanism: headtrace.Mechanism) -> None:
    assert not any("cancel" in note for note in mechanism.notes)
    first, *others = mechanism.steps
    cancelling = replace(first, flow=11 * mechanism.whole)
    assert "cancel" in replace(mechanism, steps=(cancelling, *others)).summary()


def test_a_change_against_the_answer_turns_the_signs() -> None:
    assert role(Facts(TOKENS, 8, 2, flow=-2.0, whole=-10.0, root=-2.0)) != "against"
    assert role(Facts(TOKENS, 8, 2, flow=2.0, whole=-10.0, root=2.0)) == "against"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        # The changed prompts favour the answer more: J - J' is negative, and so is what brings it about.
        ({"logits": (-2.0, 0.5), "flow": -2.5}, "*told* reads *met* and lowers *Mary*"),
        ({"logits": (-0.5, 2.0), "flow": -2.5}, "*told* reads *met* and raises *John*"),
        ({"logits": (2.0, -0.5), "flow": 2.5}, "works against *John* at *told*"),
        ({"logits": None, "flow": -2.5, "wrong": ()}, "*told* reads *met* and lowers *Mary*"),
        ({"logits": None, "flow": 2.5, "wrong": ()}, "works against the other answers at *told*"),
    ],
)
def test_where_the_wrong_answer_is_favoured_steps_say_what_they_do_to_which(facts: dict, words: str) -> None:
    given = {"answer": (" Mary",), "wrong": (" John",)} | facts
    known = Facts(TOKENS, 8, 5, whole=-10.0, root=facts["flow"], **given)
    assert RULES[role(known)].words(known) == words


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


def test_the_amount_stays_behind_an_answer_that_is_set_from_right_to_left(
    mechanism: headtrace.Mechanism,
) -> None:
    root = mechanism.circuit.root
    assert LEFT_TO_RIGHT not in mechanism.to_svg()
    hebrew = replace(mechanism.circuit, root=replace(root, wrong_tokens=("\u05d4",)))
    shown = replace(mechanism, circuit=hebrew)
    assert f"{LEFT_TO_RIGHT}{mechanism.whole:+.2f}" in shown.to_svg()


def test_the_drawing_shows_each_step_once_with_text_of_readable_size(mechanism: headtrace.Mechanism) -> None:
    import re

    drawn = mechanism.to_svg()
    cards = re.findall(r'class="card" data-step="(\d+)"', drawn)
    assert sorted(map(int, cards)) == [step.id for step in mechanism.steps]
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', drawn)) >= 11


def test_what_speaks_to_the_answer_goes_straight_up_and_passes_behind_no_card(
    mechanism: headtrace.Mechanism,
) -> None:
    import re

    drawn = mechanism.to_svg(natural_width(mechanism))
    cards = {
        int(step): tuple(map(float, box))
        for step, *box in re.findall(
            r'class="card" data-step="(\d+)".*?<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"',
            drawn,
        )
    }
    lines = re.findall(
        r'<path d="M([\d.]+),([\d.]+) C\S+ \S+ ([\d.]+),[\d.]+"[^>]*opacity="0.8" data-step="(\d+)"', drawn
    )
    assert {int(step) for *_, step in lines} == {
        s.id for s in mechanism.steps if s.role not in LOOKING and abs(s.root) > 0.005 * mechanism.whole
    }
    for x, y, top, step in ((float(x), float(y), float(top), int(step)) for x, y, top, step in lines):
        left, upper, width, _ = cards[step]
        assert left < x < left + width, "it leaves its own card"
        assert (y, top) == (upper, x), "from its upper edge, straight up"
        assert not any(a < x < a + w for a, b, w, _ in cards.values() if b < upper), (
            "beside the cards above it"
        )


@pytest.mark.parametrize("letters", [1, 9, 40])
def test_words_under_the_drawing_never_stand_over_each_other(
    mechanism: headtrace.Mechanism, letters: int
) -> None:
    import re

    prompt = mechanism.circuit.prompt
    words = tuple(f" {i % 10}{'w' * (letters - 1)}" for i in range(len(prompt.tokens)))
    long = replace(
        mechanism, circuit=replace(mechanism.circuit, prompt=replace(prompt, tokens=words, start_tokens=()))
    )
    width = 840
    found = re.findall(
        r'class="token" data-token="(\d+)"><text x="([\d.]+)" y="([\d.]+)".*?font-size="([\d.]+)".*?>(.*?)</text>',
        long.to_svg(width),
    )
    shown = {int(place) for place, *_ in found}
    assert shown >= set(involved_tokens(long)), "what takes part is always there"
    assert (len(shown) == len(words)) == (letters == 1)
    rows = dict[str, list[tuple[float, float]]]()
    for _, x, y, size, word in found:
        half = text_width(word, float(size)) / 2
        rows.setdefault(y, []).append((float(x) - half, float(x) + half))
    assert (len(rows) > 1) == (letters == 40), "more rows only where there is no other way"
    for row in rows.values():
        assert row[0][0] >= 0
        assert row[-1][1] <= width
        assert all(left[1] <= right[0] for left, right in pairwise(row))


# -- a badge that its control contradicts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "flow", "expected"),
    [
        ((6.0, 3.0, 5.5), 3.0, None),
        ((6.0, 3.0, None), 3.0, None),
        ((6.0, 3.0, 3.0), 3.0, "no more than random heads do"),
        ((6.0, 3.0, 0.5), 3.0, "no more than random heads do"),
        ((6.0, 3.0, 9.5), 3.0, "no more than random heads do"),  # as far, whichever way
        ((6.0, 3.0, 4.0), 3.0, "hardly more than random heads do"),
        ((6.0, 8.0, 5.5), 3.0, "the opposite way to the flow"),
        ((6.0, 8.0, 5.5), -3.0, None),
        ((6.0, 5.99, 6.0), 3.0, "next to nothing"),
    ],
)
def test_a_measurement_counts_only_if_it_goes_with_the_flow_and_well_beyond_its_control(
    measured: tuple[float, float, float | None], flow: float, expected: str | None
) -> None:
    assert StepMeasurement(*measured).doubt(flow, "heads") == expected


def test_a_badge_that_its_control_contradicts_looks_like_no_evidence_in_any_view(
    mechanism: headtrace.Mechanism, tmp_path
) -> None:
    mlps = next(step for step in mechanism.steps if step.role == MLPS)
    assert mlps.measured is not None
    before, without = mlps.measured.before, mlps.measured.without
    words = "no more than random MLPs do"
    contradicted = StepMeasurement(before, without, without - (before - without))
    steps = tuple(
        replace(step, measured=contradicted) if step is mlps else replace(step, measured=None)
        for step in mechanism.steps
    )
    found = replace(mechanism, steps=steps)
    assert found.summary().count(words) == 2, "on its line and in the sentence"
    assert f"; removing them changes the answer {words}" in found.sentence
    struck = [line for line in found.to_markdown().splitlines() if "~~removed:" in line]
    assert len(struck) == 1
    assert words in struck[0]
    drawn = found.to_svg()
    assert drawn.count("line-through") >= 1
    assert drawn.count('stroke-dasharray="5 4"/><circle') == 1, "its frame is dashed, no other card's"
    assert "●" not in drawn
    assert found.frame()["doubt"].drop_nulls().to_list() == [words]
    data = json.loads(found.save(tmp_path / "m.json").read_text())
    assert [step["doubt"] for step in data["steps"] if step["doubt"]] == [words]
    data["steps"][0]["doubt"] = "none at all"
    assert mechanism_from_json(data) == found, "what follows from the numbers is not read"


def test_the_control_of_mlps_are_mlps_of_the_same_layers_whose_writes_changed_as_much() -> None:
    changes = torch.tensor(
        [[0.0, 1.0, 9.0, 9.5, 9.1, 9.2, 9.3, 50.0], [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 8.0]]
    )
    sites = [Site("mlp", layer, dest=2) for layer in (0, 1)]
    for seed in range(20):
        first, second = _other_mlps(changes, sites, torch.Generator().manual_seed(seed))
        assert (first.layer, second.layer) == (0, 1)
        assert first.dest in (3, 4, 5, 6), "the four nearest, and never the step's own token"
        assert second.dest in (3, 7), "only where something differs"
    assert _other_mlps(torch.zeros(2, 8), sites, torch.Generator()) == []


# -- what a reader must be told ------------------------------------------------------------------------------


def test_where_the_changed_prompts_favour_the_answer_more_this_is_said(model: headtrace.Model) -> None:
    found = headtrace.why(model, OTHER, " Mary", " John", counterfactual=MARY, measure=False)
    assert found.whole < 0
    assert any("changed prompts favour Mary more" in note and "for John" in note for note in found.notes)
    told = headtrace.why(model, MARY, " Mary", " John", counterfactual=OTHER, measure=False)
    assert not any("favour" in note for note in told.notes)


def test_the_tokens_of_a_continuation_are_one_answer(model: headtrace.Model) -> None:
    """They are no alternatives: nothing raises "the answers"."""
    found = headtrace.why(model, MARY, answer=" Mary and", counterfactual=OTHER, measure=False)
    assert found.steps
    assert "the answers" not in found.summary()
    assert "*Mary and*" in found.sentence.replace("*Maryand*", "*Mary and*")


def test_a_step_shows_what_it_carries_and_what_it_puts_straight_into_the_answer(
    mechanism: headtrace.Mechanism,
) -> None:
    lines = mechanism.summary().splitlines()
    for step in mechanism.steps:
        (line,) = [line for line in lines if line.startswith(f"  {step.id}  ")]
        shown = line.split(step.title)[0].split()[1:]
        assert shown == [f"{step.flow:+.2f}"] + ([f"{step.root:+.2f}"] if step.root else [])


def test_how_many_prompts_were_measured_is_said(mechanism: headtrace.Mechanism) -> None:
    compared, test = mechanism.circuit.difference, mechanism.test
    assert compared is not None
    assert test is not None
    assert test.pairs == MOST_PAIRS < len(compared.prompts)
    said = f"measured, like the steps, with {MOST_PAIRS} of the {len(compared.prompts)} changed prompts"
    assert said in mechanism.summary()
    assert said not in replace(mechanism, test=replace(test, pairs=len(compared.prompts))).summary()
    assert mechanism_from_json(json.loads(json.dumps(mechanism.to_dict()))).test == test


def test_mlps_whose_layers_are_not_known_are_all_of_them(mechanism: headtrace.Mechanism) -> None:
    (mlps,) = [step for step in mechanism.steps if step.role == MLPS]
    unknown = replace(mlps, layers=None)
    others = [step for step in mechanism.steps if step is not mlps]
    found = replace(mechanism, steps=(*others, unknown))
    assert "[all MLPs]" in found.summary()
    assert "(all layers; " in found.sentence


def test_a_badge_without_a_control_says_so() -> None:
    assert StepMeasurement(6.0, 3.0).text == "removed: 6.00 -> 3.00; no control"


def test_nothing_is_minus_zero(mechanism: headtrace.Mechanism) -> None:
    first, *others = mechanism.ledger
    shown = replace(mechanism, ledger=(*others, replace(first, amount=-0.001)))
    assert "+0.00" in shown.ledger_text
    assert "-0.00" not in shown.ledger_text


def test_the_rival_and_how_it_was_chosen(model: headtrace.Model) -> None:
    own = headtrace.why(model, MARY, counterfactual=OTHER, measure=False)
    assert own.chosen == (
        "The answer is the model's own: 'Mary'.",
        "Its rival is a likely word of the prompt: 'John'.",
    )
    fact = headtrace.why(
        model, "The capital of Germany is", counterfactual="The capital of France is", measure=False
    )
    assert fact.chosen[1].startswith("Its rival is the likeliest other word: ")


def test_red_is_what_works_against_the_change_that_is_explained(model: headtrace.Model) -> None:
    """With answer and rival exchanged all signs turn, and no colour."""
    import re

    one = headtrace.why(model, MARY, " Mary", " John", counterfactual=OTHER, measure=False).to_svg()
    two = headtrace.why(model, MARY, " John", " Mary", counterfactual=OTHER, measure=False).to_svg()
    colours = [re.findall(r'<path d="M[^>]*stroke="var\((--\w+)', drawn) for drawn in (one, two)]
    assert colours[0] == colours[1]


def test_the_arrow_of_a_change_points_forward_whatever_way_its_words_are_set(
    mechanism: headtrace.Mechanism,
) -> None:
    assert LEFT_TO_RIGHT not in mechanism.origin
    compared = mechanism.circuit.difference
    assert compared is not None
    hebrew = replace(compared, prompts=(replace(compared.prompts[0], change="'\u05d4' -> '\u05d5'"),))
    shown = replace(mechanism, circuit=replace(mechanism.circuit, difference=hebrew))
    mark = LEFT_TO_RIGHT
    assert f"{mark}'\u05d4'{mark} -> '\u05d5'{mark}" in shown.origin


def test_steps_are_measured_with_changes_of_different_words(model: headtrace.Model) -> None:
    """Else a step that a change of one word explains would look as if removing it did nothing."""
    store, park = MARY.replace("store", "park"), MARY.replace("store", "school")
    others = [OTHER, store, OTHER.replace(", Mary", ", Anna"), park]
    flows = Tracer(model).difference_flows(MARY, " Mary", " John", counterfactual=others)
    chosen = measured_pairs(flows)
    assert [flows.index(pair) for pair in chosen] == [0, 3]
    assert measured_pairs(flows[:1]) == list(flows[:1])
    alone = [flows[0], flows[2]]
    assert measured_pairs(alone) == alone, "of one word, if there is no other"
