"""The forms in which prompts are given: text, token ids, what a tokenizer returns, messages of a conversation.

>>> as_prompts("When Mary"), as_prompts([5, 6]), as_prompts([[5, 6], "When Mary"])
(['When Mary'], [[5, 6]], [[5, 6], 'When Mary'])
>>> as_prompts({"input_ids": [[0, 5, 6], [7, 8, 9]], "attention_mask": [[0, 1, 1], [1, 1, 1]]})
[[5, 6], [7, 8, 9]]
>>> as_prompts([{"role": "user", "content": "Who was it?"}])
[[{'role': 'user', 'content': 'Who was it?'}]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Number
from reprlib import repr as brief
from typing import Any, cast

from headtrace.errors import InputError

EMPTY = "The prompt is empty. Give text such as 'When Mary and John ...', or token ids."
EXPECTED = "A prompt is text, a list of token ids, what a tokenizer returns, or a list of chat messages"

_ABOUT_TOKENS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
)
"""What a tokenizer returns that says nothing more than the token ids and their padding do."""


@dataclass(frozen=True)
class Chat:
    """The messages of a conversation, each with a role and text."""

    messages: tuple[Mapping[str, str], ...]


def as_prompts(prompts: object) -> list[Any]:
    """One prompt or many, as a list; text, a flat row of numbers and one conversation each count as one prompt.

    What the prompts of a list are is for their reader to say (`one_prompt`).
    """
    if _is_tokenized(prompts):
        return _rows(cast("Mapping[str, Any]", prompts))
    given = _plain(prompts)
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError(EMPTY)
    first = given[0]
    if first is None or isinstance(first, Number):
        return [_integers(given)]
    return [given] if _is_message(first) else list(given)


def one_prompt(given: object) -> str | list[int] | Chat:
    """A single prompt, whatever its form. A batch of one is one, too: tokenizers return such batches."""
    if isinstance(given, Chat):
        return given
    prompts = as_prompts(given)
    if len(prompts) > 1:
        raise InputError(
            f"Expected one prompt, got {len(prompts)}. Give them one at a time, or give all of them to something that "
            "takes many: model.record, tracer.trace_batch."
        )
    only = prompts[0]
    if _is_tokenized(only):
        return one_prompt(only)
    bare = _plain(only)
    if isinstance(bare, str):
        return bare
    if bare and _is_message(bare[0]):
        return Chat(tuple(_message(entry, place) for place, entry in enumerate(bare)))
    return one_prompt(bare) if bare and isinstance(bare[0], (str, Sequence)) else _integers(bare)


def _is_message(entry: object) -> bool:
    return isinstance(entry, Mapping) and ("role" in entry or "content" in entry)


def _is_tokenized(given: object) -> bool:
    return isinstance(given, Mapping) and "input_ids" in given


def _plain(given: object) -> str | list[Any]:
    """Text, or the entries of a sequence or array, as Python has them; whatever else it is, is not a prompt."""
    entries = _python(given)
    if isinstance(entries, str):
        return entries
    if isinstance(entries, Mapping):
        keys = ", ".join(map(repr, list(entries)[:5])) or "nothing"
        raise InputError(
            f"{EXPECTED}; got a mapping ({type(given).__name__}) with {keys}. Give the text itself, or its token ids; "
            "a tokenizer's mapping has 'input_ids', a chat is a list of messages with 'role' and 'content'."
        )
    if isinstance(entries, (bytes, bytearray, Set)) or not isinstance(entries, Iterable):
        raise InputError(f"{EXPECTED}; got {type(given).__name__}.")
    return [_python(entry) for entry in entries]


def _python(value: object) -> Any:
    """Arrays and tensors of any library say themselves what they hold, as Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value  # type: ignore[attr-defined]


def _integers(entries: list[Any]) -> list[int]:
    for place, entry in enumerate(entries):
        if not isinstance(entry, int) or isinstance(entry, bool):
            raise InputError(
                f"{EXPECTED}; got a list with {brief(entry)} ({type(entry).__name__}) at place {place}. "
                "Token ids are whole numbers, like [5, 17, 42]."
            )
    return cast("list[int]", entries)


# -- what a tokenizer returns ------------------------------------------------------------------------------------


def _rows(given: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each row of a tokenizer's result, without its padding."""
    unknown = [key for key in given if key not in _ABOUT_TOKENS]
    if unknown:
        raise InputError(
            f"The tokens come with {unknown[0]!r}, which headtrace would ignore. Give 'input_ids' and "
            "'attention_mask' only."
        )
    rows = _nested(given["input_ids"])
    if not rows:
        raise InputError(EMPTY)
    if given.get("attention_mask") is None:
        return [_integers(row) for row in rows]
    masks = _nested(given["attention_mask"])
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise InputError(
            f"'input_ids' and 'attention_mask' do not belong together: {_shape(rows)} and {_shape(masks)}."
        )
    return [_unpadded(_integers(row), mask, i) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))]


def _nested(given: object) -> list[list[Any]]:
    entries = _plain(given)
    if isinstance(entries, str):
        raise InputError(f"{EXPECTED}; got text in place of token ids: {brief(entries)}.")
    many = bool(entries) and hasattr(entries[0], "__len__")
    return [list(_plain(row)) for row in entries] if many else [entries]


def _shape(rows: list[list[Any]]) -> str:
    return f"{len(rows)} of length {', '.join(map(str, sorted({len(row) for row in rows})))}"


def _unpadded(ids: list[int], mask: list[Any], row: int) -> list[int]:
    """The tokens that the mask shows: one stretch, since a prompt has no holes."""
    wrong = [value for value in mask if value not in (0, 1)]
    if wrong:
        raise InputError(f"'attention_mask' holds {brief(wrong[0])} in row {row}: expected 0 (padding) or 1.")
    if 1 not in mask:
        raise InputError(f"'attention_mask' hides all of row {row}: there is no prompt left.")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[first:last]:
        raise InputError(
            f"'attention_mask' hides tokens inside row {row}, not only padding at its ends. headtrace lets every token "
            "see all that the model lets it see: give the row without the hidden tokens."
        )
    return ids[first:last]


# -- conversations -----------------------------------------------------------------------------------------------


def _message(entry: object, place: int) -> dict[str, str]:
    match entry:
        case {"role": str(role), "content": str(content)} if role and len(entry) == 2:  # type: ignore[arg-type]
            return {"role": role, "content": content}
        case _:
            raise InputError(
                f"Message {place} of the conversation is {brief(entry)}; expected only a role and text, like "
                '{"role": "user", "content": "Who ..."}. For anything more, apply the chat template yourself and give '
                "the token ids."
            )


# -- batches -----------------------------------------------------------------------------------------------------


def batches(
    lengths: Sequence[int], tokens_at_once: int = 2048, prompts_at_once: int | None = None
) -> list[list[int]]:
    """Which prompts to run together: similar lengths, so that little is padded, and a bounded number of tokens.

    Gives places in ``lengths``. A prompt that is longer than the bound goes alone.

    >>> batches([3, 9, 3, 8], tokens_at_once=10)
    [[0, 2], [3], [1]]
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        size = len(found[-1]) if found else 0
        fits = lengths[place] * (size + 1) <= tokens_at_once
        if found and fits and (prompts_at_once is None or size < prompts_at_once):
            found[-1].append(place)
        else:
            found.append([place])
    return found


PASS_TOKENS = 16
"""What a pass costs besides its tokens, in tokens: reading the weights (measured on SmolLM2-135M)."""


def cheapest_groups(starts: Sequence[int], cost: Callable[[int, int], float]) -> list[tuple[int, list[int]]]:
    """Which partial passes to run together so that the total cost is least.

    ``starts`` says where each may begin (a token, a layer); ``cost(n, start)`` is that of ``n`` together from
    ``start`` on. Gives, for each group, where it begins and places in ``starts``.

    >>> cheapest_groups([0, 7, 8, 0], lambda n, start: 4 + n * (10 - start))
    [(0, [0, 3]), (7, [1, 2])]
    """
    order = sorted(range(len(starts)), key=lambda i: (starts[i], i))
    # Those that begin alike stay together: groups end only where another beginning follows.
    ends = [n for n in range(1, len(order)) if starts[order[n]] != starts[order[n - 1]]]
    best: dict[int, tuple[float, int]] = {
        0: (0.0, 0)
    }  # by end: the least cost so far, and where its last group begins
    for n in [*ends, len(order)] if order else []:
        best[n] = min((best[k][0] + cost(n - k, starts[order[k]]), k) for k in best)
    groups: list[tuple[int, list[int]]] = []
    n = len(order)
    while n:
        k = best[n][1]
        groups.append((starts[order[k]], order[k:n]))
        n = k
    return groups[::-1]
