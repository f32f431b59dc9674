"""One way from text to token ids: for models and tasks, whatever the tokenizer and whatever the user gives."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headtrace.errors import InputError
from headtrace.prompts import PromptReader, as_prompts, batches, encode, following, positions_of
from headtrace.tasks import load_task
from tests.tasks import vocabularies

KINDS = ("gpt2", "gpt2 between", "opt", "llama", "llama with end token", "slow", "builtin")
kinds = pytest.mark.parametrize("kind", KINDS)
few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPECIAL = ("<s>", "</s>", "<|endoftext|>")
# Words that all of the vocabularies know; with special tokens spelled out, and anything else.
known = st.lists(
    st.sampled_from((" When", " Mary", " and", " John", ",", " 1732", "er")), min_size=1, max_size=6
)
texts = st.lists(
    st.sampled_from(("When", " Mary", " and", " John", ",", " 1732", *SPECIAL)) | st.text(max_size=3),
    max_size=8,
).map("".join)


def reader_of(kind: str, **options: Any) -> PromptReader:
    tokenizer = vocabularies.make(kind)
    return PromptReader(tokenizer, "a model", len(tokenizer), **options)


# -- special tokens ----------------------------------------------------------------------------------------------


@kinds
@given(text=texts)
@few
def test_a_text_is_what_stands_in_front_and_its_own_tokens_and_nothing_behind(kind: str, text: str) -> None:
    tokenizer = vocabularies.make(kind)
    front = encode(tokenizer, ["When"])[0]
    assert front.front == (0 if kind == "gpt2" else 1)
    (encoded,) = encode(tokenizer, [text])
    own = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert encoded.own == own
    if own:
        assert encoded.ids[: encoded.front] == front.ids[: front.front]
    if encoded.offsets is not None:
        assert len(encoded.offsets) == len(encoded.ids)


@kinds
def test_a_special_token_that_the_text_spells_is_kept(kind: str) -> None:
    tokenizer = vocabularies.make(kind)
    end = tokenizer.eos_token or tokenizer.bos_token
    front = encode(tokenizer, ["When"])[0].front
    for text, length in (("When" + end, 2), (end, 1), ("When" + end + end, 3)):
        ids = reader_of(kind).ids(text)
        assert len(ids) == front + length
        assert ids[-1] == tokenizer.convert_tokens_to_ids(end)


@kinds
def test_models_and_tasks_read_a_prompt_alike(kind: str) -> None:
    reader = reader_of(kind)
    for example in load_task("ioi", reader.tokenizer, n_per_cell=1):
        assert tuple(reader.ids(example.text)) == example.token_ids
        assert reader.continuation(example.text, example.answer) == example.answer_ids
        assert reader.token(example.text, example.wrong) == example.wrong_ids[0]


@kinds
def test_bos_can_be_forced_and_removed(kind: str) -> None:
    reader = reader_of(kind)
    bos = reader.tokenizer.bos_token_id
    own = list(encode(reader.tokenizer, ["When Mary"])[0].own)
    assert reader.ids("When Mary", bos=False) == own
    assert reader.ids("When Mary", bos=True) == [bos, *own]
    assert reader.ids("When Mary") in (own, [bos, *own])


def test_bos_that_a_tokenizer_has_not_is_an_error() -> None:
    reader = PromptReader(vocabularies.word_level(["Mary"]), "a model", 10)
    assert reader.ids("Mary", bos=False) == [1]
    with pytest.raises(InputError, match="bos=True, but this tokenizer has no"):
        reader.ids("Mary", bos=True)


def test_an_unknown_token_in_front_is_not_an_unknown_word() -> None:
    """OPT's beginning of text is also its unknown token."""
    reader = reader_of("opt")
    assert reader.tokenizer.unk_token_id == reader.tokenizer.bos_token_id == reader.ids("When Mary")[0]


# -- answers -----------------------------------------------------------------------------------------------------


@kinds
@given(prompt=known.map("".join) | texts, answer=known.map("".join) | texts)
@few
def test_prompt_and_continuation_are_the_longer_text(kind: str, prompt: str, answer: str) -> None:
    reader = reader_of(kind)
    try:
        ids, more = reader.ids(prompt), reader.continuation(prompt, answer)
    except InputError:
        return
    assert [*ids, *more] == reader.ids(prompt + answer)
    alone = tuple(reader.tokenizer(answer, add_special_tokens=False)["input_ids"])
    assert more == alone or len(alone) > 1


@kinds
def test_an_answer_behind_token_ids_is_read_alone(kind: str) -> None:
    reader = reader_of(kind)
    alone = tuple(reader.tokenizer(" Mary", add_special_tokens=False)["input_ids"])
    assert reader.continuation(reader.ids("When John met"), " Mary") == alone
    assert reader.continuation(None, " Mary") == alone
    assert reader.continuation("When John met", " Mary") == alone


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "message"),
    [
        (
            "builtin",
            "John gave it to",
            "Mary",
            r"changes how the end .* Did you mean ' Mary', with a leading space",
        ),
        (
            "llama",
            "John gave it to",
            "Mary",
            r"something else right behind.*: 'M' \+ 'ary'. Did you mean ' Mary'",
        ),
        (
            "gpt2",
            "John gave it to ",
            "Mary",
            r"changes how .*Leave out the space at the end .* write ' Mary'",
        ),
        (
            "gpt2",
            "John gave it to",
            " Marylou",
            r"answer ' Marylou' is \d tokens for this model: ' Mary' \+ .*one token\.$",
        ),
        ("builtin", "John gave it to", " Xanadu", "' Xanadu' is not in the model's vocabulary"),
        ("builtin", "John gave it to", " <|endoftext|> Xanadu", "not in the model's vocabulary"),
        ("builtin", "John gave it to", "", "answer '' has no tokens"),
        ("builtin", "", " Mary", "The prompt is empty"),
        (
            "builtin",
            None,
            "Mary and",
            r"is 2 tokens for this model: 'Mary' \+ 'and'.*Did you mean ' Mary and'",
        ),
        ("builtin", None, 9999, "Unknown token id 9999 as answer: valid ids are 0 to 484"),
        ("builtin", None, -1, "Unknown token id -1 as answer"),
        ("builtin", None, True, r"text or a token id; got True \(bool\)"),
        ("builtin", None, 1.0, r"text or a token id; got 1.0 \(float\)"),
        ("builtin", None, " \ud800", "half a character"),
    ],
)
def test_an_answer_that_is_not_meant_so_is_explained(
    kind: str, prompt: Any, answer: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        reader_of(kind).token(prompt, answer)


@pytest.mark.parametrize("one", [5, np.int64(5), torch.tensor(5)])
def test_a_token_id_stands_for_itself(one: Any) -> None:
    assert reader_of("builtin").token("When Mary", one) == 5


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama", "slow"])
def test_a_special_token_can_be_the_answer(kind: str) -> None:
    """Also where it is the unknown token: GPT-2 has one token for everything special."""
    reader = reader_of(kind)
    end = reader.tokenizer.eos_token or reader.tokenizer.bos_token
    assert reader.token("When Mary", end) == reader.tokenizer.convert_tokens_to_ids(end)
    assert reader.token(None, end) == reader.token("When Mary", end)


def test_what_is_asked_for_has_its_name_in_errors() -> None:
    with pytest.raises(InputError, match="The wrong answer ' Xanadu'"):
        reader_of("builtin").token(None, " Xanadu", "wrong answer")


# -- what a user may give ----------------------------------------------------------------------------------------

IDS = [5, 17, 42]
SAME = {
    "list": IDS,
    "tuple": tuple(IDS),
    "numpy": np.array(IDS, dtype=np.int32),
    "torch": torch.tensor(IDS),
    "list of numpy numbers": [np.int64(i) for i in IDS],
    "list of tensors": [torch.tensor(i) for i in IDS],
}


@pytest.mark.parametrize("given", SAME.values(), ids=SAME)
def test_token_ids_in_any_form(given: Any) -> None:
    found = PromptReader(None, "a model", 50).ids(given)
    assert found == IDS
    assert all(type(token) is int for token in found)
    assert as_prompts(given) == [IDS]


def test_a_range_is_a_sequence_of_ids_too() -> None:
    assert PromptReader(None, "a model", 50).ids(range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([5, True], r"list with True \(bool\) at place 1"),
        ([5.0], r"list with 5.0 \(float\) at place 0"),
        (np.array([5.0]), r"list with 5.0 \(float\) at place 0"),
        (np.array([True]), "bool"),
        ([[5, 6]], r"list with \[5, 6\] \(list\) at place 0"),
        (torch.tensor([[5, 6]]), r"list with \[5, 6\] \(list\) at place 0"),
        ([5, "Mary"], r"'Mary' \(str\) at place 1"),
        ({"input_ids": [5]}, r"a mapping \(dict\). Give the text"),
        (b"Mary", "got bytes"),
        ({5, 6}, "got set"),
        (5, "got int"),
        (None, "got NoneType"),
        (torch.tensor(5), "got Tensor"),
        ([], "The prompt is empty"),
        ("", "The prompt is empty"),
        (" ", "The prompt is empty"),
        ([5, 485], "Unknown token id 485: 'a model' has token ids 0 to 484"),
        ([-1], "Unknown token id -1"),
        ([5] * 65, "The prompt has 65 tokens, but 'a model' has a context of 64"),
        ("When Xanadu met Shangri", "does not hold 'Xanadu', 'Shangri': the tokenizer turns it into"),
        ("When \ud800", r"half a character \('\\ud800' at place 5\)"),
    ],
)
def test_what_is_no_prompt_is_named(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reader_of("builtin", max_positions=64).ids(given)


def test_a_tokenizers_own_output_is_refused_for_now() -> None:
    batch = vocabularies.make("builtin")("When Mary")
    for read in (reader_of("builtin").ids, as_prompts):
        with pytest.raises(InputError, match=r"a mapping \(BatchEncoding\)"):
            read(batch)


def test_unknown_words_without_offsets() -> None:
    with pytest.raises(InputError, match="does not hold a part of the prompt"):
        reader_of("slow").ids("When Xanadu")


def test_without_a_tokenizer_ids_work_and_text_does_not() -> None:
    reader = PromptReader(None, "a model", 50)
    assert reader.token([5, 6], 7) == 7
    assert reader.labels([5, 6]) == ("#5", "#6")
    with pytest.raises(InputError, match="'a model' was loaded without a tokenizer: text cannot be read"):
        reader.ids("When Mary")
    with pytest.raises(InputError, match="without a tokenizer: give the answer as a token id"):
        reader.token([5, 6], " Mary")


@kinds
def test_labels_are_the_tokens_as_they_are_spelled(kind: str) -> None:
    reader = reader_of(kind)
    (encoded,) = encode(reader.tokenizer, ["When Mary, and John"])
    labels = reader.labels(encoded.own)
    assert [label.strip() for label in labels] == ["When", "Mary", ",", "and", "John"]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("When Mary", ["When Mary"]),
        (["When Mary", "When John"], ["When Mary", "When John"]),
        ([[5, 6], "When Mary", (7,)], [[5, 6], "When Mary", (7,)]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([torch.tensor([5, 6]), np.array([7])], [[5, 6], [7]]),
        ((text for text in ("When Mary", "When John")), ["When Mary", "When John"]),
    ],
)
def test_one_prompt_or_many(given: Any, prompts: list[Any]) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    "given", [[], (), np.zeros((0,), dtype=int), 5, None, {"a": 1}, b"ab", [5, None], [1.5]]
)
def test_no_prompts_at_all(given: Any) -> None:
    with pytest.raises(InputError):
        as_prompts(given)


# -- words and batches -------------------------------------------------------------------------------------------


@kinds
@given(words=st.lists(st.sampled_from(("Mary", "John", "Tom", "Anna")), min_size=1, max_size=6))
@few
def test_every_word_is_found_where_it_is(kind: str, words: list[str]) -> None:
    tokenizer = vocabularies.make(kind)
    (encoded,) = encode(tokenizer, ["When " + " ".join(words)])
    start = 5
    for number, word in enumerate(words):
        assert positions_of(tokenizer, encoded, (start, start + len(word))) == (encoded.front + 1 + number,)
        start += len(word) + 1


def test_what_follows_is_none_where_the_prompt_changes() -> None:
    tokenizer = vocabularies.make("gpt2")
    prompt, longer, other = encode(tokenizer, ["John gave it to ", "John gave it to Mary", "John gave it"])
    assert following(prompt, longer) is None
    assert following(prompt, prompt) is None
    assert following(other, longer) == longer.ids[len(other.ids) :]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    tokens=st.integers(1, 200),
    prompts=st.none() | st.integers(1, 8),
)
@few
def test_batches_hold_every_prompt_once_within_bounds_and_in_order_of_length(
    lengths: list[int], tokens: int, prompts: int | None
) -> None:
    found = batches(lengths, tokens, prompts)
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert [lengths[place] for batch in found for place in batch] == sorted(lengths)
    for batch in found:
        padded = max(lengths[place] for place in batch) * len(batch)
        assert padded <= tokens or len(batch) == 1
        assert prompts is None or len(batch) <= prompts
    # None could have taken the first prompt of the next one.
    for batch, after in pairwise(found):
        assert lengths[after[0]] * (len(batch) + 1) > tokens or len(batch) == prompts


def test_reading_prompts_needs_no_torch() -> None:
    code = "import sys, headtrace.prompts, headtrace.lines; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
