"""Where words are in a tokenized text, and which single token continues it, for any tokenizer.

Positions come from the tokenizer's offset mapping and are checked by decoding them. A tokenizer without
offsets, or with offsets that fail the check, is read by tokenizing growing prefixes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A text as the model sees it; special tokens in front are kept, special tokens behind are dropped."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[Span, ...] | None


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoded]:
    """Tokenize texts as the model's own tokenizer does, special tokens included.

    What a tokenizer puts behind a text (an end-of-text token) would come between the prompt and its
    continuation, so it is left off.
    """
    if not texts:
        return []
    with_offsets = bool(tokenizer.is_fast)
    batch: Any = tokenizer(
        list(texts), return_offsets_mapping=with_offsets, return_special_tokens_mask=True, padding=False
    )
    encoded: list[Encoded] = []
    for row, text in enumerate(texts):
        special: list[int] = batch["special_tokens_mask"][row]
        length = len(special)
        while length and special[length - 1]:
            length -= 1
        offsets = (
            tuple((int(start), int(end)) for start, end in batch["offset_mapping"][row][:length])
            if with_offsets
            else None
        )
        encoded.append(Encoded(text, tuple(batch["input_ids"][row][:length]), offsets))
    return encoded


def positions_of(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """The token positions that hold the characters ``span``; empty if that cannot be told reliably."""
    word = encoded.text[span[0] : span[1]]
    for positions in (_by_offsets(encoded, span), _by_prefixes(tokenizer, encoded, span)):
        if _hold_exactly(tokenizer, [encoded.ids[position] for position in positions], word):
            return positions
    return ()


def _hold_exactly(tokenizer: PreTrainedTokenizerBase, ids: list[int], word: str) -> bool:
    """Whether these tokens spell the word, and none at either side could be spared."""
    spelled = [decoded(tokenizer, part) for part in (ids, ids[1:], ids[:-1])]
    return word in spelled[0] and word not in spelled[1] and word not in spelled[2]


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of some tokens, exactly as they are spelled."""
    text: Any = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return str(text)


def is_one_token(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> bool:
    """Whether these characters are one known token that holds nothing else but a space."""
    positions = positions_of(tokenizer, encoded, span)
    if len(positions) != 1:
        return False
    token = encoded.ids[positions[0]]
    word = encoded.text[span[0] : span[1]]
    return not is_unknown(tokenizer, token) and decoded(tokenizer, [token]).strip() == word


def is_unknown(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return tokenizer.unk_token_id is not None and token == tokenizer.unk_token_id


def next_token(prompt: Encoded, extended: Encoded) -> int | None:
    """The token that follows ``prompt`` in a longer text, or None if the prompt's own tokens change."""
    length = len(prompt.ids)
    if len(extended.ids) <= length or extended.ids[:length] != prompt.ids:
        return None
    return extended.ids[length]


def single_next_token(
    tokenizer: PreTrainedTokenizerBase, prompt: Encoded, extended: Encoded
) -> tuple[int | None, str]:
    """The one token that the continuation is, or None and the reason why it is not one."""
    token = next_token(prompt, extended)
    if token is None:
        return None, "the continuation changes how the prompt is split into tokens"
    added = extended.ids[len(prompt.ids) :]
    if any(is_unknown(tokenizer, each) for each in added):
        return None, "not in the vocabulary"
    if len(added) > 1:
        return None, "more than one token"
    return token, ""


def _by_offsets(encoded: Encoded, span: Span) -> tuple[int, ...]:
    if encoded.offsets is None:
        return ()
    return tuple(
        position
        for position, (start, end) in enumerate(encoded.offsets)
        if start < end and start < span[1] and end > span[0]
    )


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """Tokens that the text up to the end of the span has, and the text before the span has not."""
    before, until = encode(tokenizer, [encoded.text[: span[0]].rstrip(), encoded.text[: span[1]]])
    if encoded.ids[: len(until.ids)] != until.ids or until.ids[: len(before.ids)] != before.ids:
        return ()
    return tuple(range(len(before.ids), len(until.ids)))
