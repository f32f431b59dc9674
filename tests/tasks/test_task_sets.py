"""Sets are exactly balanced, the same everywhere for the same seed, and their controls pair up."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from typing import Any

import pytest

from headtrace.errors import InputError
from headtrace.tasks import TASKS, load_task
from headtrace.tasks.ioi import FORMS
from headtrace.tasks.words import Draw

CELLS = {
    "ioi": ("form", "order"),
    "greater-than": ("form", "century"),
    "pronoun": ("form", "gender"),
    "facts": ("relation", "form"),
}


@pytest.mark.parametrize("name", list(TASKS))
def test_sets_are_exactly_balanced_without_repeats(tokenizer: Any, name: str) -> None:
    task_set = load_task(name, tokenizer, n_per_cell=5)
    counts = task_set.counts(*CELLS[name])
    assert len(counts) == TASKS[name].n_cells
    assert set(counts.values()) == {5}
    texts = [example.text for example in task_set]
    assert len(set(texts)) == len(texts)


def test_published_size_is_three_thousand(builtin_tokenizer: Any) -> None:
    task_set = load_task("ioi", builtin_tokenizer, n_per_cell=100)
    assert len(task_set) == 3000
    assert set(task_set.counts("form", "order").values()) == {100}
    assert len({example.text for example in task_set}) == 3000


def test_fifteen_forms_have_the_slots_of_the_published_set() -> None:
    assert len(set(FORMS)) == 15
    for form in FORMS:
        assert form.count("{first}") == form.count("{second}") == form.count("{S2}") == 1
        assert form.index("{first}") < form.index("{second}") < form.index("{S2}")
        assert form.endswith(" to")
    # Two forms of the published set, about what is said after a quarrel, have neither place nor object.
    assert sum("{place}" in form for form in FORMS) == 13
    assert sum("{object}" in form for form in FORMS) == 13


@pytest.mark.parametrize("name", list(TASKS))
def test_seed_decides_the_set(builtin_tokenizer: Any, name: str) -> None:
    first = load_task(name, builtin_tokenizer, n_per_cell=4, seed=1)
    assert load_task(name, builtin_tokenizer, n_per_cell=4, seed=1) == first
    assert load_task(name, builtin_tokenizer, n_per_cell=4, seed=2).examples != first.examples


def test_smaller_set_is_a_part_of_the_larger(builtin_tokenizer: Any) -> None:
    small = {example.text for example in load_task("ioi", builtin_tokenizer, n_per_cell=3)}
    assert small < {example.text for example in load_task("ioi", builtin_tokenizer, n_per_cell=7)}


def digest(name: str, tokenizer: Any) -> str:
    lines = [
        f"{each.id}|{each.text}|{each.answer}|{each.wrong}"
        for each in load_task(name, tokenizer, n_per_cell=3, seed=7)
    ]
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


# Frozen: these sets must come out the same on any machine and with any version of Python.
DIGESTS = {
    "ioi": "4496da80e5633adf",
    "greater-than": "c4d4d3b4e5d8eb3e",
    "pronoun": "1bb0e117c1506b75",
    "facts": "ddaba0bc515a3709",
}


@pytest.mark.parametrize("name", list(TASKS))
def test_sets_are_the_same_on_any_machine(builtin_tokenizer: Any, name: str) -> None:
    assert digest(name, builtin_tokenizer) == DIGESTS[name]


def test_draws_do_not_depend_on_the_process() -> None:
    code = "from headtrace.tasks.words import Draw; print(Draw('a', 1).shuffled(list('headtrace')))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(Draw("a", 1).shuffled(list("headtrace")))


def test_flipped_control_exchanges_the_names_and_nothing_else(builtin_tokenizer: Any) -> None:
    standard = load_task("ioi", builtin_tokenizer, n_per_cell=2)
    flipped = load_task("ioi", builtin_tokenizer, n_per_cell=2, variant="flipped")
    for one, other in zip(standard, flipped, strict=True):
        assert one.id == other.id
        assert (one.answer, one.wrong) == (other.wrong, other.answer)
        assert one.roles == other.roles
        exchanged = (
            one.text.replace(one.answer, " \0").replace(one.wrong, one.answer).replace(" \0", one.wrong)
        )
        assert other.text == exchanged


def test_random_names_control_changes_only_the_second_mention(builtin_tokenizer: Any) -> None:
    standard = load_task("ioi", builtin_tokenizer, n_per_cell=2)
    control = load_task("ioi", builtin_tokenizer, n_per_cell=2, variant="random-names")
    for one, other in zip(standard, control, strict=True):
        assert (one.id, one.answer, one.wrong, one.roles) == (
            other.id,
            other.answer,
            other.wrong,
            other.roles,
        )
        differing = [
            i for i, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if len(set(pair)) > 1
        ]
        assert differing == [one.roles["S2"]]


def test_where_selects_by_label(builtin_tokenizer: Any) -> None:
    task_set = load_task("ioi", builtin_tokenizer, n_per_cell=2)
    assert len(task_set.where(order="ABBA", form="03")) == 2
    assert {example.labels["order"] for example in task_set.where(order="BABA")} == {"BABA"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "ioy"}, "no task 'ioy'.*ioi"),
        ({"name": "ioi", "n_per_cell": 0}, "at least 1"),
        ({"name": "ioi", "variant": "upside-down"}, "upside-down.*flipped"),
        ({"name": "facts", "variant": "flipped"}, "no variant 'flipped'"),
        ({"name": "facts", "n_per_cell": 1000}, "only 2[0-9] .*at most 2[0-9]"),
    ],
)
def test_impossible_requests_say_what_is_possible(
    builtin_tokenizer: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_task(tokenizer=builtin_tokenizer, **arguments)
