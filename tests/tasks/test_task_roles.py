"""Roles point at the right tokens, whatever the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headtrace.prompts import encode, positions_of
from headtrace.tasks import Example, load_task
from tests.tasks import vocabularies

some_seeds = given(seed=st.integers(0, 2**32 - 1))
few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def token_at(tokenizer: Any, example: Example, role: str) -> str:
    return tokenizer.decode([example.token_ids[example.roles[role]]]).strip()


def assert_read_as_the_model_does(tokenizer: Any, example: Example) -> None:
    """The prompt's ids are the tokenizer's own, and each answer is the one token that follows them."""
    (prompt,) = encode(tokenizer, [example.text])
    assert example.token_ids == prompt.ids
    assert example.roles["end"] == len(example.token_ids) - 1
    for text, ids in ((example.answer, example.answer_ids), (example.wrong, example.wrong_ids)):
        assert encode(tokenizer, [example.text + text])[0].ids == (*prompt.ids, ids[0])


@some_seeds
@few
@pytest.mark.parametrize("variant", ["standard", "flipped", "random-names"])
def test_ioi_positions_decode_to_the_names(tokenizer: Any, variant: str, seed: int) -> None:
    for example in load_task("ioi", tokenizer, n_per_cell=1, seed=seed, variant=variant):
        io, s = example.answer.strip(), example.wrong.strip()
        assert token_at(tokenizer, example, "IO") == io
        assert token_at(tokenizer, example, "S1") == s
        second = token_at(tokenizer, example, "S2")
        assert (second == s) if variant != "random-names" else (second not in (io, s))
        first_two = sorted((example.roles["IO"], example.roles["S1"]))
        assert first_two[1] < example.roles["S2"] < example.roles["end"]
        assert (example.roles["IO"] < example.roles["S1"]) == (example.labels["order"] == "ABBA")
        assert_read_as_the_model_does(tokenizer, example)


@some_seeds
@few
def test_pronoun_and_facts_positions_decode_to_the_words(tokenizer: Any, seed: int) -> None:
    for example in load_task("pronoun", tokenizer, n_per_cell=2, seed=seed):
        assert token_at(tokenizer, example, "name") in example.text.split()
        assert_read_as_the_model_does(tokenizer, example)
    for example in load_task("facts", tokenizer, n_per_cell=2, seed=seed):
        words = example.text.replace(",", "").split()
        assert any(word.endswith(token_at(tokenizer, example, "subject")) for word in words)
        assert_read_as_the_model_does(tokenizer, example)


@some_seeds
@few
def test_greater_than_sides_are_the_later_and_the_earlier_years(tokenizer: Any, seed: int) -> None:
    for example in load_task("greater-than", tokenizer, n_per_cell=1, seed=seed):
        year = next(word for word in example.text.split() if word.isdigit() and len(word) == 4)
        yy = token_at(tokenizer, example, "YY")
        assert yy in (year[2:], year[2])
        right = [int(tokenizer.decode([token])) for token in example.answer_ids]
        wrong = [int(tokenizer.decode([token])) for token in example.wrong_ids]
        start = int(yy)
        if len(yy) == 2:
            assert sorted(right) == list(range(start + 1, 100))
            assert sorted(wrong) == list(range(start + 1))
        else:
            # Single digits: the tens decide, and the same tens only if no later year has them.
            assert sorted(right) == list(range(start + 1, 10))
            assert sorted(wrong) == list(range(start + (year[3] == "9")))
        assert_read_as_the_model_does(tokenizer, example)


@pytest.mark.parametrize("shift", [None, 3, -40])
def test_positions_do_not_trust_offsets_blindly(tokenizer: Any, shift: int | None) -> None:
    (plain,) = encode(tokenizer, ["When Mary and John met, John said"])
    assert plain.offsets is not None
    moved = None if shift is None else tuple((start + shift, end + shift) for start, end in plain.offsets)
    for span in ((0, 4), (5, 9), (14, 18), (24, 28)):
        expected = positions_of(tokenizer, plain, span)
        assert len(expected) == 1
        assert positions_of(tokenizer, replace(plain, offsets=moved), span) == expected


@pytest.mark.parametrize("kind", ["slow", "opt"])
def test_tokenizers_without_offsets_and_with_one_special_token_for_everything(kind: str) -> None:
    reader = vocabularies.make(kind)
    for example in load_task("ioi", reader, n_per_cell=1):
        assert token_at(reader, example, "IO") == example.answer.strip()
        assert token_at(reader, example, "S2") == example.wrong.strip()
        assert_read_as_the_model_does(reader, example)
