"""Which tokens of a text hold a word.

Positions come from the tokenizer's offsets and are checked by decoding them. Where offsets are missing or wrong,
growing prefixes are tokenized instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.prompts.encoding import Encoded, Span, decoded, encode, is_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def positions_of(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """The token positions that hold the characters ``span``; empty if that cannot be told reliably."""
    word = encoded.text[span[0] : span[1]]
    for find in (_by_offsets, _by_prefixes):
        positions = find(tokenizer, encoded, span)
        if _hold_exactly(tokenizer, [encoded.ids[position] for position in positions], word):
            return positions
    return ()


def is_one_token(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> bool:
    """Whether these characters are one known token that holds nothing else but a space."""
    positions = positions_of(tokenizer, encoded, span)
    if len(positions) != 1:
        return False
    token = encoded.ids[positions[0]]
    word = encoded.text[span[0] : span[1]]
    return not is_unknown(tokenizer, token) and decoded(tokenizer, [token]).strip() == word


def _hold_exactly(tokenizer: PreTrainedTokenizerBase, ids: list[int], word: str) -> bool:
    """Whether these tokens spell the word, and none at either side could be spared."""
    spelled = [decoded(tokenizer, part) for part in (ids, ids[1:], ids[:-1])]
    return word in spelled[0] and word not in spelled[1] and word not in spelled[2]


def _by_offsets(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    return tuple(
        position
        for position, (start, end) in enumerate(encoded.offsets or ())
        if start < end and start < span[1] and end > span[0]
    )


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """Tokens that the text up to the end of the span has, and the text before the span has not."""
    before, until = encode(tokenizer, [encoded.text[: span[0]].rstrip(), encoded.text[: span[1]]])
    known = before.ids if before.text else until.ids[: until.front]
    if encoded.ids[: len(until.ids)] != until.ids or until.ids[: len(known)] != known:
        return ()
    return tuple(range(len(known), len(until.ids)))
