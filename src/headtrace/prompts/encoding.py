"""One text as tokens, what follows it in a longer one, and which tokens hold a word.

Positions of a word come from the tokenizer's offsets and are checked by decoding them. Where offsets are missing or
wrong, growing prefixes are tokenized instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast
from unicodedata import category

from headtrace.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters of a text: [start, end)."""


@dataclass(frozen=True)
class Encoded:
    """A text as the model sees it."""

    text: str
    ids: tuple[int, ...]
    """Special tokens in front are kept; those behind are dropped."""
    front: int
    """How many tokens the tokenizer put in front of the text."""
    offsets: tuple[Span, ...] | None
    """Which characters each token holds, if the tokenizer tells."""

    @property
    def own(self) -> tuple[int, ...]:
        """The tokens of the text itself."""
        return self.ids[self.front :]


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = True
) -> list[Encoded]:
    """Tokenize texts as the model's own tokenizer does. Only what the tokenizer adds behind a text is left off:
    a special token that the text itself spells is kept, and one that it spells at its beginning is not put in front
    of it once more. With ``special=False`` nothing is added: a chat template spells all special tokens itself.

    >>> import headtrace
    >>> encode(headtrace.load("builtin").tokenizer, ["When Mary"])
    [Encoded(text='When Mary', ids=(2, 7, 201), front=1, offsets=((0, 0), (0, 4), (5, 9)))]
    """
    if not texts:
        return []
    for text in texts:
        require_unicode(text)
    if not tokenizer.is_fast:
        return [_undoubled(each) for each in _encode_slowly(tokenizer, texts, special)]
    batch = tokenizer(
        list(texts),
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        padding=False,
    )
    rows = zip(texts, batch["input_ids"], batch["special_tokens_mask"], batch["offset_mapping"], strict=True)
    return [_undoubled(_encoded(*row)) for row in cast(Iterable[Any], rows)]


def _undoubled(encoded: Encoded) -> Encoded:
    """A text that begins with the very special tokens that stand in front of it brings its own."""
    front = encoded.front
    if not front or encoded.own[:front] != encoded.ids[:front]:
        return encoded
    offsets = None if encoded.offsets is None else encoded.offsets[front:]
    return Encoded(encoded.text, encoded.own, 0, offsets)


def _encoded(text: str, ids: list[int], added: list[int], offsets: list[Span]) -> Encoded:
    """``added`` marks what is not of the text: a special token that the text spells is not marked."""
    front = sum(takewhile(bool, added))
    behind = sum(takewhile(bool, reversed(added[front:])))
    end = len(ids) - behind
    return Encoded(text, tuple(ids[:end]), front, tuple((start, stop) for start, stop in offsets[:end]))


def _encode_slowly(tokenizer: Any, texts: Sequence[str], special: bool) -> list[Encoded]:
    """Tokenizers written in Python have no offsets, and not all of them mark what they add; their template shows it."""
    place = -1
    template: list[int] = tokenizer.build_inputs_with_special_tokens([place]) if special else [place]
    front = template.index(place)
    behind = len(template) - front - 1
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    return [
        Encoded(text, tuple(ids[: len(ids) - behind]), front, None)
        for text, ids in zip(texts, rows, strict=True)
    ]


def require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The text {text!r} has half a character ({text[error.start]!r} at place {error.start}). No tokenizer can "
            "read it: was the text cut in two, or read in another encoding than its own?"
        ) from None


def following(prompt: Encoded, longer: Encoded) -> tuple[int, ...] | None:
    """The tokens that follow a prompt in a longer text, or None if the prompt's own tokens change."""
    length = len(prompt.ids)
    if len(longer.ids) <= length or longer.ids[:length] != prompt.ids:
        return None
    return longer.ids[length:]


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of some tokens, exactly as they are spelled."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


UNREADABLE = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that one character (or a few that are joined) is spelled with, at most."""


def spelled(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as a person reads it. One that holds only a part of a character is named by the character and part,
    ``\u00e9(1/2)``, or, where the rest of it is missing, by its bytes, ``<F0 9F>``; a character that cannot be seen
    by its number, ``U+200D(1/2)``."""
    labels = [decoded(tokenizer, [token]) for token in ids]
    start = 0
    while start < len(ids):
        if UNREADABLE not in labels[start]:
            start += 1
            continue
        ends = range(start + 2, min(len(ids), start + LONGEST_CHARACTER) + 1)
        whole = ((end, decoded(tokenizer, ids[start:end])) for end in ends)
        end, text = next(((end, text) for end, text in whole if UNREADABLE not in text), (start + 1, None))
        for place in range(start, end):
            seen = f"U+{ord(text):04X}" if text and len(text) == 1 and category(text) == "Cf" else text
            part = f"{seen}({place - start + 1}/{end - start})"
            labels[place] = _bytes_of(tokenizer, ids[place]) if text is None else part
        start = end
    return tuple(labels)


def _bytes_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The bytes of a token of a byte-level vocabulary, in hex; else its name in the vocabulary."""
    name = str(tokenizer.convert_ids_to_tokens([token])[0])
    # Byte-level vocabularies write printable bytes as themselves, and the others, in order, from U+0100 on.
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte = {chr(each): each for each in shown} | {chr(256 + i): each for i, each in enumerate(hidden)}
    return f"<{' '.join(f'{byte[c]:02X}' for c in name)}>" if all(c in byte for c in name) else name


def is_unknown(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether this token stands for words that the vocabulary does not hold."""
    return tokenizer.unk_token_id is not None and token == tokenizer.unk_token_id


def has_unknown(tokenizer: PreTrainedTokenizerBase, text: str, ids: Iterable[int]) -> bool:
    """Whether some of the tokens of a text stand for words that the vocabulary does not hold.

    A text may spell the unknown token itself: that of GPT-2 is its end of text.
    """
    return any(is_unknown(tokenizer, token) for token in ids) and str(tokenizer.unk_token) not in text


# -- which tokens hold a word -----------------------------------------------------------------------------------


def positions_of(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """The token positions that hold the characters ``span``; empty if that cannot be told reliably."""
    word, offsets = encoded.text[span[0] : span[1]], encoded.offsets or ()
    inside = tuple(i for i, (a, b) in enumerate(offsets) if a < b and a < span[1] and b > span[0])
    if _hold_exactly(tokenizer, [encoded.ids[position] for position in inside], word):
        return inside
    positions = _by_prefixes(tokenizer, encoded, span)
    return positions if _hold_exactly(tokenizer, [encoded.ids[i] for i in positions], word) else ()


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


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, span: Span) -> tuple[int, ...]:
    """Tokens that the text up to the end of the span has, and the text before the span has not."""
    before, until = encode(tokenizer, [encoded.text[: span[0]].rstrip(), encoded.text[: span[1]]])
    known = before.ids if before.text else until.ids[: until.front]
    if encoded.ids[: len(until.ids)] != until.ids or until.ids[: len(known)] != known:
        return ()
    return tuple(range(len(known), len(until.ids)))
