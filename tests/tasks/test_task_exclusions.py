"""What a vocabulary does not hold is left out, counted and named, or refused; never silently changed."""

from __future__ import annotations

from typing import Any

import pytest

from headtrace.errors import InputError
from headtrace.tasks import load_task
from headtrace.tasks.words import NAMES
from tests.tasks.vocabularies import RARE_NAMES, word_level


@pytest.mark.parametrize("kind", ["gpt2_tokenizer", "llama_tokenizer"])
@pytest.mark.parametrize("task", ["ioi", "pronoun"])
def test_names_of_several_tokens_are_left_out_and_counted(
    kind: str, task: str, request: pytest.FixtureRequest
) -> None:
    task_set = load_task(task, request.getfixturevalue(kind), n_per_cell=20)
    assert sorted(each.item for each in task_set.excluded) == sorted(RARE_NAMES)
    assert task_set.excluded_counts() == {"name is not one token of this vocabulary": len(RARE_NAMES)}
    used = {word.strip(",.") for example in task_set for word in example.text.split()}
    assert used.isdisjoint(RARE_NAMES)


def test_single_digits_leave_out_years_that_they_cannot_decide(llama_tokenizer: Any) -> None:
    task_set = load_task("greater-than", llama_tokenizer, n_per_cell=15)
    assert set(task_set.excluded_counts()) == {
        "no token of this vocabulary says that the year is later",
        "no token of this vocabulary says that the year is earlier",
    }
    assert len(task_set) == 12 * 15


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="needs a tokenizer"):
        load_task("ioi", None)


def test_vocabulary_without_names_is_refused() -> None:
    with pytest.raises(InputError, match=f"holds 2 of the {len(NAMES)} IOI names"):
        load_task("ioi", word_level(["Then", "they", "met", "again", "Mary", "John"]))


def test_vocabulary_with_names_but_without_the_sentences_is_refused() -> None:
    names_only = word_level(["Then", "they", "met", "again", "Mary", "John", "Tom", "Anna"])
    with pytest.raises(InputError, match=r"form 1, ABBA.*only 0.*not in the vocabulary"):
        load_task("ioi", names_only, n_per_cell=2)


def test_unknown_word_is_not_taken_for_a_name() -> None:
    # Every unknown word is the same single token; it must not pass for one name or another.
    some = word_level(["Then", "they", "met", "again", *NAMES[:5]])
    with pytest.raises(InputError):
        load_task("ioi", some, n_per_cell=1)
