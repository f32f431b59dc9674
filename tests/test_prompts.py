"""One way from text to token ids: for models and tasks, whatever the tokenizer and whatever the user gives."""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from headtrace.errors import InputError
from headtrace.prompts import PromptReader, as_prompts, batches, encode, following, positions_of
from headtrace.prompts.encoding import spelled
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
    if own and own[: front.front] != front.ids[: front.front]:
        assert encoded.ids[: encoded.front] == front.ids[: front.front]
    elif own:  # the text brings what would stand in front of it
        assert encoded.front == 0
    if encoded.offsets is not None:
        assert len(encoded.offsets) == len(encoded.ids)


@kinds
def test_a_special_token_that_the_text_spells_is_kept(kind: str) -> None:
    tokenizer = vocabularies.make(kind)
    end = tokenizer.eos_token or tokenizer.bos_token
    front = encode(tokenizer, ["When"])[0].front
    for text, length in (("When" + end, 2), ("When" + end + end, 3)):
        ids = reader_of(kind).ids(text)
        assert len(ids) == front + length
        assert ids[-1] == tokenizer.convert_tokens_to_ids(end)


@kinds
def test_a_text_that_spells_its_beginning_does_not_get_another(kind: str) -> None:
    """As a chat template that was applied by hand does."""
    reader = reader_of(kind)
    plain, bos = reader.ids("When Mary"), reader.tokenizer.bos_token_id
    spelled = reader.ids(reader.tokenizer.bos_token + "When Mary")
    assert spelled.count(bos) == max(1, plain.count(bos))
    assert spelled[0] == bos
    assert reader.ids(reader.tokenizer.bos_token) == [bos]
    assert reader.continuation(reader.tokenizer.bos_token + "When", " Mary") == reader.continuation(
        "When", " Mary"
    )


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
        ([[5, 6], [7]], "Expected one prompt, got 2"),
        (torch.tensor([[5, 6], [7, 8]]), "Expected one prompt, got 2.*trace_batch"),
        (["When Mary", "When John"], "Expected one prompt, got 2"),
        ([5, "Mary"], r"'Mary' \(str\) at place 1"),
        ({"text": "When Mary"}, r"a mapping \(dict\) with 'text'. Give the text"),
        ({}, r"a mapping \(dict\) with nothing"),
        ({"input_ids": "When Mary"}, "text in place of token ids: 'When Mary'"),
        ({"input_ids": [5.0]}, r"list with 5.0 \(float\)"),
        ({"input_ids": []}, "The prompt is empty"),
        ({"input_ids": [[5], [6]]}, "Expected one prompt, got 2"),
        ({"input_ids": [5], "position_ids": [9]}, "come with 'position_ids', which headtrace would ignore"),
        (
            {"input_ids": [5, 6], "attention_mask": [1]},
            "do not belong together: 1 of length 2 and 1 of length 1",
        ),
        ({"input_ids": [[5, 6]], "attention_mask": [1, 1, 1]}, "do not belong together"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "hides tokens inside row 0"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "hides all of row 0"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "holds 2 in row 0"),
        ([{"role": "user"}], "Message 0 of the conversation is .*expected only a role and text"),
        ([{"role": "user", "content": "When"}, "Mary"], "Message 1 of the conversation is 'Mary'"),
        ([{"role": "user", "content": None}], "Message 0 .*apply the chat template yourself"),
        (
            [{"role": "user", "content": "a", "name": "Mary"}],
            "Message 0 .*'Mary'.*expected only a role and text",
        ),
        ([{"role": "user", "content": "When Mary"}], "'a model' has no chat template"),
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
        ("When Xanadu met Shangri", "does not contain 'Xanadu', 'Shangri': the tokenizer turns it into"),
        ("When \ud800", r"half a character \('\\ud800' at place 5\)"),
    ],
)
def test_what_is_no_prompt_is_named(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reader_of("builtin", max_positions=64).ids(given)


@kinds
@pytest.mark.parametrize("tensors", [None, "pt", "np"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_tokenizer_returns_is_its_tokens_without_padding(
    kind: str, tensors: str | None, side: str
) -> None:
    tokenizer = copy.deepcopy(vocabularies.make(kind))
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.bos_token, side
    reader = PromptReader(tokenizer, "a model", len(tokenizer))
    texts = ["When Mary", "When Mary and John"]
    plain = [tokenizer(text)["input_ids"] for text in texts]
    batch = tokenizer(texts, padding=True, return_tensors=tensors)
    assert as_prompts(batch) == plain
    assert as_prompts(dict(batch)) == plain
    for text, ids in zip(texts, plain, strict=True):
        one = tokenizer(text, return_tensors=tensors)
        assert reader.ids(one) == ids
        assert reader.ids(one["input_ids"]) == ids
        assert reader.text(one) is None
    assert [reader.ids(each) for each in as_prompts([tokenizer(text) for text in texts])] == plain


@pytest.mark.ill_typed
@pytest.mark.parametrize(
    "given", [[[5, 6]], torch.tensor([[5, 6]]), np.array([[5, 6]]), [torch.tensor([5, 6])]]
)
def test_a_batch_of_one_is_one_prompt(given: Any) -> None:
    assert PromptReader(None, "a model", 50).ids(given) == [5, 6]
    assert chatting("builtin").ids([CHAT]) == chatting("builtin").ids(CHAT)


def test_bos_is_refused_where_it_would_be_without_effect() -> None:
    with pytest.raises(InputError, match="bos=False says how text is read, and this prompt is token ids"):
        reader_of("builtin").ids([5, 6], bos=False)


# -- conversations -----------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('who is ' + message.role) }}{% endif %}"
    "When {{ message.content }},{% endfor %}{% if add_generation_prompt %} and{% endif %}"
)
CHAT = [{"role": "user", "content": "Mary"}, {"role": "assistant", "content": "John"}]


def chatting(kind: str) -> PromptReader:
    tokenizer = copy.deepcopy(vocabularies.make(kind))
    tokenizer.chat_template = TEMPLATE
    return PromptReader(tokenizer, "a model", len(tokenizer))


@kinds
def test_a_conversation_is_what_the_tokenizers_own_template_makes_of_it(kind: str) -> None:
    reader = chatting(kind)
    own = reader.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert reader.ids(CHAT) == list(own["input_ids"])
    assert reader.ids(CHAT) == reader.ids(own)
    assert reader.ids(CHAT).count(reader.tokenizer.bos_token_id) == 1
    assert reader.text(CHAT).endswith("When Mary,When John, and")
    assert reader.ids(CHAT, bos=False) == reader.ids(CHAT)[1:]
    assert as_prompts(CHAT) == [CHAT]
    assert as_prompts([CHAT, CHAT[:1], "When"]) == [CHAT, CHAT[:1], "When"]


@kinds
def test_an_answer_is_read_as_it_follows_a_conversation(kind: str) -> None:
    reader = chatting(kind)
    longer = reader.tokenizer(reader.text(CHAT) + " Mary", add_special_tokens=False)["input_ids"]
    assert [*reader.ids(CHAT), *reader.continuation(CHAT, " Mary")] == longer


def test_messages_that_the_template_refuses_are_an_error() -> None:
    with pytest.raises(InputError, match=r"chat template of 'a model' refuses .*who is system"):
        chatting("builtin").ids([{"role": "system", "content": "Mary"}])
    with pytest.raises(InputError, match="half a character"):
        chatting("builtin").ids([{"role": "user", "content": "\ud800"}])
    with pytest.raises(InputError, match="without a tokenizer: messages cannot be read"):
        PromptReader(None, "a model", 50).text(CHAT)
    with pytest.raises(InputError, match=r"changes how .*token id, or as the chat's next words begin"):
        chatting("builtin").continuation(CHAT, "Mary")


def test_unknown_words_without_offsets() -> None:
    with pytest.raises(InputError, match="does not contain a part of the prompt"):
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


def test_pieces_of_a_character_are_named_by_the_character_or_their_bytes() -> None:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    ids = tokenizer("aé😀b")["input_ids"]
    emoji = [f"😀({part}/4)" for part in range(1, 5)]
    assert spelled(tokenizer, ids) == ("a", "é(1/2)", "é(2/2)", *emoji, "b")
    assert spelled(tokenizer, ids[3:5]) == ("<F0>", "<9F>"), "the rest of the character is not there"
    assert spelled(tokenizer, ids[1:2] * 2) == ("<C3>", "<C3>")
    unseen = tokenizer("a\u200d")["input_ids"]
    assert spelled(tokenizer, unseen) == ("a", *(f"U+200D({part}/3)" for part in range(1, 4)))
