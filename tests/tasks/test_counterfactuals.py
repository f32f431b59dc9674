"""Counterfactual prompts: of equal length, with roles in their places, the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headtrace.errors import InputError
from headtrace.prompts import encode
from headtrace.tasks import TASKS, TaskSet, counterfactuals, load_task
from headtrace.tasks.counterfactuals import refill, unfill
from headtrace.tasks.facts import RELATIONS
from headtrace.tasks.ioi import FORMS
from headtrace.tasks.words import FEMALE_NAMES, MALE_NAMES, NAMES

EVERY = [(task.name, kind) for task in TASKS.values() for kind in task.kinds]


def words(text: str) -> list[str]:
    return text.replace(",", " ").replace(".", " ").split()


def changed(before: str, after: str) -> list[tuple[str, str]]:
    assert len(words(before)) == len(words(after))
    return [(a, b) for a, b in zip(words(before), words(after), strict=True) if a != b]


@pytest.mark.parametrize(("task", "kind"), EVERY)
def test_every_counterfactual_has_the_length_of_its_prompt_and_is_another_one(
    tokenizer: Any, task: str, kind: str
) -> None:
    task_set = load_task(task, tokenizer, n_per_cell=2)
    made = counterfactuals(task_set, tokenizer, kind)
    assert len(made) + len(made.excluded) == len(task_set)
    assert len(made) >= 0.9 * len(task_set)
    for one in made:
        example = next(e for e in task_set if e.id == one.id)
        assert one.token_ids == encode(tokenizer, [one.text])[0].ids
        assert len(one.token_ids) == len(example.token_ids)
        assert one.text != example.text
        assert made[example] is one
    assert list(counterfactuals(task_set, tokenizer, kind)) == list(made), "the same on every call"


def test_ioi_abc_has_three_other_names_and_flip_exchanges_the_two(gpt2_tokenizer: Any) -> None:
    task_set = load_task("ioi", gpt2_tokenizer, n_per_cell=2)
    abc, flip = (counterfactuals(task_set, gpt2_tokenizer, kind) for kind in ("abc", "flip"))
    assert not abc.excluded
    assert not flip.excluded
    for example in task_set:
        io, s = example.answer.strip(), example.wrong.strip()
        three = [new for _, new in changed(example.text, abc[example].text)]
        assert len(set(three)) == 3
        assert {io, s}.isdisjoint(three)
        assert set(three) <= set(NAMES)
        assert sorted(changed(example.text, flip[example].text)) == sorted([(io, s), (s, io), (s, io)])


def test_flip_is_the_flipped_variant_of_the_same_fill_in(builtin_tokenizer: Any) -> None:
    task_set = load_task("ioi", builtin_tokenizer, n_per_cell=2)
    flipped = {e.id: e.text for e in load_task("ioi", builtin_tokenizer, n_per_cell=2, variant="flipped")}
    made = counterfactuals(task_set, builtin_tokenizer, "flip")
    assert {one.id: one.text for one in made} == flipped


def test_pronouns_change_gender_facts_their_subject_and_years_their_start_or_century(
    builtin_tokenizer: Any,
) -> None:
    pronoun = load_task("pronoun", builtin_tokenizer, n_per_cell=2)
    for example in pronoun:
        [(old, new)] = changed(example.text, counterfactuals(pronoun, builtin_tokenizer)[example].text)
        assert (old in FEMALE_NAMES) == (new in MALE_NAMES)
    facts = load_task("facts", builtin_tokenizer, n_per_cell=2)
    for example in facts:
        [(old, new)] = changed(example.text, counterfactuals(facts, builtin_tokenizer)[example].text)
        relation = RELATIONS[example.labels["relation"]]
        assert relation[old] != relation[new]
    years = load_task("greater-than", builtin_tokenizer, n_per_cell=2)
    for example in years:
        century = example.labels["century"]
        [(old, new)] = changed(example.text, counterfactuals(years, builtin_tokenizer)[example].text)
        assert (old[:2], new) == (century, f"{century}01")
        both = changed(example.text, counterfactuals(years, builtin_tokenizer, "century")[example].text)
        assert [(a[:2], b[:2]) for a, b in both] == [(century, both[0][1][:2])] * 2
        assert both[0][0][2:] == both[0][1][2:]


def test_another_seed_draws_other_names(gpt2_tokenizer: Any) -> None:
    task_set = load_task("ioi", gpt2_tokenizer, n_per_cell=1)
    first, second = (counterfactuals(task_set, gpt2_tokenizer, seed=seed) for seed in (0, 1))
    assert sum(a.text != b.text for a, b in zip(first, second, strict=True)) > len(task_set) / 2


def test_a_prompt_without_one_of_equal_length_is_counted_and_named(gpt2_tokenizer: Any) -> None:
    """Brandon is several tokens of this vocabulary, and no exchange brings him to another place."""
    task_set = load_task("ioi", gpt2_tokenizer, n_per_cell=1)
    example = task_set[0]
    text, _ = refill(FORMS[0], example.text, first="Brandon")
    odd = replace(example, text=text, token_ids=encode(gpt2_tokenizer, [text])[0].ids)
    made = counterfactuals(TaskSet("ioi", (odd, task_set[1])), gpt2_tokenizer, "flip")
    assert [one.item for one in made.excluded] == [odd.id]
    assert "1 of 2 prompts have one of equal length" in repr(made)
    assert TASKS["ioi"].counterfactual(odd, gpt2_tokenizer, "flip") is None
    with pytest.raises(InputError, match="no 'flip' counterfactual for 'ioi/01"):
        made[odd]


def test_what_a_task_cannot_make_is_an_error_that_says_what_it_can(builtin_tokenizer: Any) -> None:
    task_set = load_task("ioi", builtin_tokenizer, n_per_cell=1)
    with pytest.raises(InputError, match=r"has no counterfactual 'cab'\. It has: abc, flip"):
        counterfactuals(task_set, builtin_tokenizer, "cab")
    with pytest.raises(InputError, match="'mine' makes no counterfactuals"):
        counterfactuals(replace(task_set, task="mine"), builtin_tokenizer)
    with pytest.raises(InputError, match="is not of the form"):
        unfill(FORMS[0], "Mary had a little lamb")
    assert unfill(FORMS[11], "When A and B bought a C at the D, B offered the C to") == {
        "first": "A", "second": "B", "object": "C", "place": "D", "S2": "B",
    }  # fmt: skip
