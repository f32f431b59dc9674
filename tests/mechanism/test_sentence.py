"""The sentence claims what was measured, says which way a head looks, and is English that is read once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headtrace
from headtrace.mechanism import RULES, Facts
from headtrace.mechanism.parts import Step, StepHead, StepMeasurement, looks_away
from headtrace.mechanism.rules import role
from headtrace.mechanism.sentence import looking_text, make_clauses

TOKENS = ("<s>", " When", " Mary", " and", " John", " met", ",", " John", " told")


def head(
    name: str, dest: int, src: int, flow: float, root: float = 0.0, here: float = 0.5, there: float = 0.5
) -> StepHead:
    layer, number = map(int, name.removeprefix("L").split("H"))
    return StepHead(name, layer, number, dest, src, flow, root, attention=here, other_attention=there)


def said(*steps: Step, favoured: str = "*Mary*") -> str:
    return " ".join(clause.text for clause in make_clauses(steps, TOKENS, favoured))


COPY = Step(2, "copies", "*told* copies *Mary*", 3.0, 2.5, 8, 2, (head("L9H0", 8, 2, 3.0, 2.5),))
FIND = Step(1, "finds", "the second *John* finds the first", 1.2, 0.0, 7, 4, (head("L8H1", 7, 4, 1.2),))
AGAINST = Step(
    3, "against", "works against *Mary* at *told*", -2.0, -1.5, 8, 2, (head("L9H1", 8, 2, -2.0, -1.5),)
)
CONFIRMED, CONTRADICTED = StepMeasurement(6.0, 3.0, 6.0), StepMeasurement(6.0, 5.5, 3.0)


# -- which way a head looks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"src": 4, "dest": 7}, "the second *John* looks away from the first *John*"),
        ({"src": 5, "dest": 7}, "the second *John* looks away from *met*, the token after the first *John*"),
        ({"src": 5, "dest": 5}, "*met* looks away from its own position"),
        ({"src": 5, "dest": 6}, "*,* looks away from *met*"),
        ({"src": 0, "dest": 5}, "*met* looks away from the first token"),
        ({"src": 5, "root": 2.0}, "*told* raises *Mary* by looking away from *met*"),
        ({"src": 7, "root": 2.0, "logits": (0.1, -1.9)}, "*told* lowers *John* by looking away from the second *John*"),
    ],
)  # fmt: skip
def test_a_head_that_hardly_attends_here_is_not_said_to_look_here(facts: dict, words: str) -> None:
    """Its flow may be large for just that reason: in the other prompts it looks there."""
    given = {"dest": 8, "flow": 2.0, "answer": (" Mary",), "wrong": (" John",)} | facts
    known = Facts(TOKENS, whole=10.0, attention=0.02, other_attention=0.3, **given)  # pyright: ignore[reportArgumentType]
    assert RULES[role(known)].words(known) == words
    looking = replace(known, attention=0.3)
    assert role(looking) == role(known), "the name is the same: prompts are compared by it"
    assert "away" not in RULES[role(looking)].words(looking)


def test_without_attention_nobody_looks_away() -> None:
    assert not looks_away(None, 0.3)
    assert not looks_away(0.1, None)
    assert not looks_away(0.0, 0.0)


def test_a_sentence_never_says_that_a_head_looks_where_it_does_not() -> None:
    """On the built-in model, word for word against the attention of the heads behind it."""
    model = headtrace.load("builtin")
    found = headtrace.why(model, "When Mary and John went to the store, John gave a drink to", budget=40)
    for step in found.steps:
        if (
            step.role in ("carries", "previous", "finds", "induction")
            and len({h.src for h in step.heads}) == 1
        ):
            assert ("looks away" in step.text) == step.heads[0].looks_away


def test_of_several_heads_those_that_look_away_are_named() -> None:
    heads = (head("L3H1", 8, 7, 2.0, 2.0), head("L3H2", 8, 7, 1.0, 1.0, here=0.05, there=0.4))
    step = Step(1, "lowers", "*told* reads *John* and lowers *John*", 3.0, 3.0, 8, 7, heads)
    assert said(step) == ("*told* reads *John* and lowers *John* (L3H1, L3H2; L3H2 by looking away; +3.00).")


def test_what_raises_both_answers_is_said_to_raise_one_more() -> None:
    def words(answer: float, wrong: float) -> str:
        facts = Facts(
            TOKENS, 8, 5, 2.0, 10.0, answer - wrong, (answer, wrong), answer=(" he",), wrong=(" she",)
        )
        return RULES[role(facts)].words(facts)

    assert words(3.5, 2.0) == "*told* reads *met* and raises *he* more than *she*"
    assert words(3.5, 0.5) == "*told* reads *met* and raises *he*"
    assert words(-2.0, -3.5) == "*told* reads *met* and lowers *she* more than *he*"
    assert words(0.5, -1.5) == "*told* reads *met* and lowers *she*"


# -- several tokens ------------------------------------------------------------------------------------------


def test_tokens_that_one_step_looks_at_are_listed_once() -> None:
    heads = [
        head("L5H0", 7, 4, 2.0),
        head("L6H0", 7, 5, 1.5),
        head("L6H1", 7, 3, 1.0, here=0.01, there=0.4),
        head("L6H2", 7, 1, 0.2),
    ]
    assert looking_text(TOKENS, heads[:3]) == (
        "the second *John* finds the first, looks at *met* (after the first *John*), and looks away from *and*"
    )
    assert looking_text(TOKENS, heads).endswith(", and more")
    assert looking_text(TOKENS, [head("L1H0", 8, 2, 1.0), head("L1H0", 8, 5, 0.5)]) == (
        "*told* looks at *Mary* and *met*"
    )


# -- the sentence --------------------------------------------------------------------------------------------


def test_steps_at_one_token_share_their_subject() -> None:
    second = replace(COPY, id=4, role="raises", text="*told* reads *met* and raises *Mary*", root=0.5)
    assert said(FIND, COPY, second) == (
        "The second *John* finds the first (L8H1; carrying +1.20). "
        "*told* copies *Mary* (L9H0; +2.50), and reads *met* and raises *Mary* (L9H0; +0.50)."
    )


def test_all_that_works_against_the_answer_is_one_sentence_of_negative_numbers() -> None:
    early = replace(AGAINST, id=4, dest=2, root=0.01, flow=-0.3)
    mlps = Step(5, "mlps", "the MLPs at *told* work against *Mary*", -0.4, -0.4, 8, layers=(3, 5))
    assert said(COPY, AGAINST, early, mlps) == (
        "*told* copies *Mary* (L9H0; +2.50). "
        "Against *Mary*: L9H1 at *told* (-1.50); L9H1 at *Mary* (carrying -0.30); MLPs 3 to 5 at *told* (-0.40)."
    )


def test_a_step_that_its_measurement_does_not_bear_out_is_no_claim() -> None:
    doubted = replace(COPY, measured=CONTRADICTED)
    sentence = said(replace(FIND, measured=CONFIRMED), doubted, replace(AGAINST, measured=CONTRADICTED))
    claims, _, rest = sentence.partition("Not confirmed: ")
    assert claims.strip() == "The second *John* finds the first (L8H1; carrying +1.20)."
    assert rest == (
        "*told* copies *Mary* (L9H0; +2.50; removing it changes the answer no more than random heads do); "
        "L9H1 against *Mary* at *told* (-1.50; removing it changes the answer no more than random heads do)."
    )


def test_every_step_has_its_clause_and_a_renamed_one_keeps_its_name() -> None:
    named = COPY.renamed("says the name")
    clauses = make_clauses((FIND, named, replace(AGAINST, measured=CONTRADICTED)), TOKENS, "*Mary*")
    assert sorted(clause.step for clause in clauses if clause.step is not None) == [1, 2, 3]
    assert "Says the name (L9H0; +2.50)." in [clause.text for clause in clauses]
    assert "hidden" not in said(FIND, replace(COPY, hidden=True, name="hidden"))
