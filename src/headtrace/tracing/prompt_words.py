"""The words of a prompt, what is asked about it where nobody said (the model's answer and its strongest rival), and
natural replacements of the words.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> asked = ask(model, "When Mary and John went to the store, John gave a drink to")
>>> asked.root.question()
'"Mary" rather than "John"'

For a replacement, a word is exchanged for another of the same shape (leading space, capital, digits, number of tokens),
so that the prompt keeps its length and every position its counterpart. Replacements come from three places: words of
the prompt itself, what the model finds likely there, and neighbours in the input embedding. What each does to the
metric is measured in `headtrace.tracing.measured_replacements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.forward import KeptKeys, forward_behind, forward_keeping
from headtrace.prompts.encoding import decoded, encode
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.roots import Likelihood, LogitDifference
from headtrace.vocabulary import FUNCTION_WORDS, ordinal

if TYPE_CHECKING:
    from headtrace.models import Model, Recording


LIKELIEST = 10
"""A rival of the answer is looked for among so many likeliest tokens."""

WordKind = Literal["content", "function", "punctuation"]


@dataclass(frozen=True)
class Word:
    """A word of a prompt: one token, or several that are exchanged as a whole."""

    text: str
    positions: tuple[int, ...]
    kind: WordKind


def ask(model: Model, prompt: Any, answer: Any = None, wrong: Any = None, **options: Any) -> ResolvedRequest:
    """A request with an answer and a rival: those that are given, or those that the model itself suggests.

    Without an answer, the model's own; without a wrong one, the strongest rival (`rival`). An answer of several tokens
    has no rival: its log-likelihood is what is explained.
    """
    request = TraceRequest.create(prompt, answer=answer, wrong=wrong, **options)
    if request.root is not None or not set(request.about) <= {"answer", "wrong"} or "wrong" in request.about:
        return request.resolve(model)
    logits = None
    if "answer" not in request.about:
        logits = model.end_logits([request.token_ids(model)])[0]
        request = replace(request, about={"answer": int(logits.argmax())})
    resolved = request.resolve(model)
    assert isinstance(resolved.root, Likelihood)
    if resolved.root.continuation:
        return resolved
    logits = model.end_logits([resolved.ids])[0] if logits is None else logits
    about = {
        "answer": resolved.root.answer,
        "wrong": rival(model, resolved.ids, logits, resolved.root.answer),
    }
    return replace(request, about=about).resolve(model)


def rival(
    model: Model, ids: Sequence[int], logits: Float[Tensor, " vocab"], answer: Sequence[int]
) -> tuple[int, ...]:
    """The strongest rival of an answer: of the ten likeliest tokens, a content word of the prompt if there is one, else
    the first word for a word, and the first number for a number; else the likeliest token. None that spells the answer
    as well."""
    special = special_tokens(model)
    taken = {plain(label) for label in model.token_labels(answer)}
    order = [token for token in logits.argsort(descending=True)[:64].tolist() if token not in special]
    labels = dict(zip(order, model.token_labels(order), strict=True))
    free = [token for token in order if token not in answer and plain(labels[token]) not in taken]
    if not free:
        raise InputError("No other token rivals the answer: give a wrong answer.")
    words, kinds = content_words(model, ids), {kind_of(label) for label in model.token_labels(answer)}
    likely = [token for token in order[:LIKELIEST] if token in free]
    of_prompt = [token for token in likely if plain(labels[token]) in words]
    alike = [token for token in likely if kind_of(labels[token]) in kinds - {"symbol"}]
    return ((of_prompt or alike or free)[0],)


def content_words(model: Model, ids: Sequence[int]) -> set[str]:
    """The content words of a prompt, as they are compared with others."""
    return {plain(word.text) for word in words_of(model, ids) if word.kind == "content"}


TokenKind = Literal["word", "number", "symbol"]


def kind_of(label: str) -> TokenKind:
    """What a token is for people.

    >>> kind_of(" are"), kind_of("1743"), kind_of(":"), kind_of(" ")
    ('word', 'number', 'symbol', 'symbol')
    """
    text = label.strip()
    return "number" if text.isdigit() else "word" if any(map(str.isalpha, text)) else "symbol"


def plain(text: str) -> str:
    """A word as it is compared with others: without spaces around it and capitals."""
    return text.strip().lower()


def special_tokens(model: Model) -> set[int]:
    """Tokens that stand for no text."""
    return set() if model.tokenizer is None else set(model.tokenizer.all_special_ids)


def words_of(model: Model, ids: Sequence[int]) -> tuple[Word, ...]:
    """The words of a prompt; special tokens and bare spaces are none. Without a tokenizer every token is one.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> [word.text for word in words_of(model, model.to_ids("When Mary went to the"))]
    ['When', 'Mary', 'went', 'to', 'the']
    """
    labels, special = model.token_labels(ids), special_tokens(model)
    if model.tokenizer is None:
        return tuple(Word(label, (i,), "content") for i, label in enumerate(labels))
    groups: list[list[int]] = []
    for i, token in enumerate(ids):
        if token in special or not labels[i].strip():
            continue
        follows = False
        if groups and groups[-1][-1] == i - 1:
            joined, first = decoded(model.tokenizer, [ids[i - 1], token]), labels[i - 1]
            rest = joined[len(first) :] if joined.startswith(first) else labels[i]
            follows = first[-1:].isalnum() and rest[:1].isalnum()
        if follows:
            groups[-1].append(i)
        else:
            groups.append([i])
    found: list[Word] = []
    for group in groups:
        text = decoded(model.tokenizer, [ids[i] for i in group]).strip()
        kind: WordKind = "content" if any(map(str.isalnum, text)) else "punctuation"
        kind = "function" if text.lower() in FUNCTION_WORDS else kind
        found.append(Word(text, tuple(group), kind))
    return tuple(found)


PER_SOURCE = 6
"""Replacements of a word from each of the three places, at most."""
COSINES_AT_ONCE = 16_000_000
"""Cosines of tokens with the whole vocabulary that exist at a time."""

Source = Literal["prompt", "likely", "neighbour"]
Reason = Literal["answer", "relation", "other"]
"""What an exchange shows: what is copied (the answer's own word), why it is found (a repeated word), or neither."""


@dataclass(frozen=True)
class Replacement:
    """A prompt with one word (or two) exchanged, run through the model."""

    positions: tuple[int, ...]
    before: str
    after: str
    ids: tuple[int, ...]
    """The tokens of the changed prompt."""
    text: str
    """The changed prompt, for people."""
    source: Source
    """Where the replacement comes from."""
    reason: Reason
    value: float = 0.0
    """The metric on the changed prompt."""
    effect: float = 0.0
    """How much of the metric is lost: its value on the prompt less that on the changed one."""
    naturalness: float = 0.0
    """Log-likelihood of the changed prompt less that of the prompt itself, under the model."""
    flips: bool = False
    """Whether the model now prefers another answer."""
    which: int = 0
    """Which of the equal words of the prompt is exchanged, counted from one; 0 where there is only one."""

    def __str__(self) -> str:
        which = f"{ordinal(self.which)} " if self.which else ""
        return f"{which}{self.before!r} -> {self.after or ' '!r}"


@dataclass(frozen=True)
class _Vocabulary:
    """The shape of every token, and the input embeddings, centred and of length one."""

    shapes: Int[Tensor, " vocab"]
    embeddings: Float[Tensor, "vocab d_model"]

    @classmethod
    def of(cls, model: Model) -> _Vocabulary:
        def make() -> _Vocabulary:
            spelled: Sequence[str | None] = [""] * model.d_vocab
            if model.tokenizer is not None:
                known = min(len(model.tokenizer), model.d_vocab)
                spelled = model.tokenizer.convert_ids_to_tokens(list(range(known)))
                spelled = [*spelled, *[None] * (model.d_vocab - known)]
            special, kinds = special_tokens(model), dict[Any, int]()
            codes = [
                -1 if token is None or i in special else kinds.setdefault(_shape(token), len(kinds))
                for i, token in enumerate(spelled)
            ]
            weight: Any = model.hf.get_input_embeddings().weight
            table = weight.detach().to(model.device, model.dtype)
            table = table - table.mean(0)
            table = table / table.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            return cls(torch.tensor(codes, device=model.device), table)

        return model.cached("shapes of tokens", make)


def _shape(token: str) -> tuple[bool, str, bool]:
    """Leading space, kind of characters, and whether they are plain ones."""
    bare = token.lstrip("Ġ▁ ")
    if bare.isdigit():
        kind = f"{len(bare)} digits"
    elif bare.isalpha():
        kind = (
            "lower" if bare.islower() else "capital" if bare[0].isupper() and bare[1:].islower() else "mixed"
        )
        kind = "single letter" if len(bare) == 1 else kind
    else:
        kind = "other"
    return token != bare, kind, bare.isascii()


class ReplacementSearch:
    """Finds replacements of the words of one prompt."""

    def __init__(self, model: Model, asked: ResolvedRequest, recording: Recording, seed: int) -> None:
        self.model, self.asked, self.ids = model, asked, asked.ids
        self.prompt = torch.tensor([asked.ids], device=model.device)
        self.vocabulary = _Vocabulary.of(model)
        self.log_probs = recording.logits[0].log_softmax(-1)
        self.generator = torch.Generator().manual_seed(seed)
        tail = len(asked.ids) - len(asked.root.answer_prefix)
        self.words = tuple(word for word in words_of(model, self.ids) if word.positions[-1] < tail)
        own = asked.root.answer if isinstance(asked.root, LogitDifference | Likelihood) else ()
        self.answer = {plain(label) for label in model.token_labels(own)}
        counts = [plain(word.text) for word in self.words]
        self.repeated = {word for word in counts if counts.count(word) > 1}

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...] | None:
        """Which characters of the text each token holds, where the text alone gives these tokens again."""
        text = self.asked.text
        if text is None or self.model.tokenizer is None or not isinstance(self.asked.request.prompt, str):
            return None
        read = encode(self.model.tokenizer, [text])[0]
        ids = self.ids[: len(self.ids) - len(self.asked.root.answer_prefix)]
        if read.offsets is None or list(read.ids) != ids:
            return None
        return read.offsets

    def replacements(self, word: Word) -> list[Replacement]:
        """Of one word: from the three places in turn."""
        own = tuple(self.ids[i] for i in word.positions)
        sources: dict[Source, list[tuple[int, ...]]] = {
            "prompt": self._of_prompt(word, own),
            "likely": self._likely(word, own),
            "neighbour": self._near(word, own),
        }
        seen, found = {own}, list[Replacement]()
        for row in zip_longest(*sources.values()):
            for source, new in zip(sources, row, strict=True):
                if new is not None and new not in seen:
                    seen.add(new)
                    made = self._make(word, new, source)
                    found += [] if made is None else [made]
        return found

    def _same_shape(self, token: int) -> Bool[Tensor, " vocab"]:
        return self.vocabulary.shapes == self.vocabulary.shapes[token]

    def _of_prompt(self, word: Word, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        shape = self.vocabulary.shapes[list(own)].tolist()
        found = [
            tuple(self.ids[i] for i in other.positions) for other in self.words if other.kind == word.kind
        ]
        same = [new for new in found if self.vocabulary.shapes[list(new)].tolist() == shape]
        return list(dict.fromkeys(same))[: PER_SOURCE + 1]

    def _likely(self, word: Word, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Drawn as the model predicts the place from what stands before; further tokens of a word: the likeliest."""
        first = word.positions[0]
        if first == 0:
            return []
        scores = self.log_probs[first - 1].masked_fill(~self._same_shape(own[0]), -torch.inf).cpu()
        noise = -torch.empty(len(scores), dtype=scores.dtype).exponential_(generator=self.generator).log()
        drawn = (scores + noise).topk(min(PER_SOURCE + 1, len(scores)))
        rows = [
            [token]
            for token, score in zip(drawn.indices.tolist(), drawn.values, strict=True)
            if score > -torch.inf
        ]
        for place in own[1:]:
            if not rows:
                break
            logits = self._next(first, rows)
            best = logits.masked_fill(~self._same_shape(place), -torch.inf).argmax(-1).tolist()
            rows = [[*row, token] for row, token in zip(rows, best, strict=True)]
        return [tuple(row) for row in rows]

    @cached_property
    def _kept(self) -> KeptKeys | None:
        """Keys and values of the prompt: words of several tokens are continued behind them."""
        return forward_keeping(self.model, self.prompt)[1]

    def _next(self, start: int, rows: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """Output logits behind each row of tokens, where it stands behind the first ``start`` tokens of the prompt."""
        if self._kept is None:
            return self.model.end_logits([[*self.ids[:start], *row] for row in rows])
        tokens = torch.tensor([list(row) for row in rows], device=self.model.device)
        return forward_behind(self.model, self._kept, start, tokens)[:, -1]

    def _near(self, word: Word, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Neighbours in the embedding; of a word of several tokens, each token in turn (for numbers: any digits)."""
        if len(own) > 1 and not word.text.isdigit():
            return []  # a piece alone does not make a word
        return [
            (*own[:place], new, *own[place + 1 :])
            for place, token in enumerate(own)
            for new in self._neighbours[token]
        ]

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        """The nearest tokens of the same shape, of each token of the prompt."""
        table, shapes = self.vocabulary.embeddings, self.vocabulary.shapes
        tokens, found = torch.tensor(sorted(set(self.ids)), device=table.device), dict[int, list[int]]()
        for some in tokens.split(max(1, COSINES_AT_ONCE // len(table))):
            cosines = (table[some] @ table.T).masked_fill(shapes != shapes[some][:, None], -torch.inf)
            cosines.scatter_(1, some[:, None], -torch.inf)
            best = cosines.topk(min(PER_SOURCE, len(table)))
            for token, near, values in zip(
                some.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
            ):
                found[token] = [new for new, value in zip(near, values, strict=True) if value > -torch.inf]
        return found

    def _make(self, word: Word, new: tuple[int, ...], source: Source) -> Replacement | None:
        """The changed prompt; None where its text would not be read as these tokens again."""
        ids = list(self.ids)
        for place, token in zip(word.positions, new, strict=True):
            ids[place] = token
        tokenizer = self.model.tokenizer
        after = (
            " ".join(self.model.token_labels(new)) if tokenizer is None else decoded(tokenizer, new).strip()
        )
        if tokenizer is None:
            text = " ".join(self.model.token_labels(ids))
        else:
            text = decoded(tokenizer, ids)
            if self._spans is not None and self.asked.text is not None:
                start, end = self._spans[word.positions[0]][0], self._spans[word.positions[-1]][1]
                old = self.asked.text[start:end]
                text = self.asked.text[:start] + old.replace(old.strip(), after) + self.asked.text[end:]
                if list(encode(tokenizer, [text])[0].ids) != ids[: len(self._spans)]:
                    return None
        again = word.kind == "content" and plain(word.text) in self.repeated
        reason: Reason = "relation" if again else "other"
        reason = "answer" if plain(word.text) in self.answer else reason
        equal = [other.positions for other in self.words if other.text == word.text]
        which = 1 + equal.index(word.positions) if len(equal) > 1 else 0
        return Replacement(word.positions, word.text, after, tuple(ids), text, source, reason, which=which)
