"""Natural replacements of the words of a prompt, and what each does to the number that a root reads.

A word is exchanged for another of the same shape (leading space, capital, digits, number of tokens), so that the prompt
keeps its length and every position its counterpart. Replacements come from three places: words of the prompt itself,
what the model finds likely there, and neighbours in the input embedding. All changed prompts run together; the same
pass gives the metric and the log-likelihood of the changed prompt, its *naturalness*. Changes that flip the answer are
counterfactual prompts that nobody had to write.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> asked = ask(model, "When Mary and John went to the store, John gave a drink to")
>>> asked.root.question()
'"Mary" rather than "John"'
>>> found = measure(model, asked, budget=60)
>>> change = found.flips[0]
>>> change.before, change.flips, len(change.ids) == len(asked.ids)
('Mary', True, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.forward import forward, forward_behind, forward_keeping
from headtrace.models.observer import Observer, Rotary
from headtrace.progress import Progress
from headtrace.prompts import PASS_TOKENS, cheapest_groups
from headtrace.prompts.encoding import decoded, encode
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.roots import Likelihood, LogitDifference
from headtrace.vocabulary import FUNCTION_WORDS

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.roots import Root

BUDGET = 120
"""Changed prompts that are run, unless another number is given."""
COUNTERFACTUALS = 4
"""Changed prompts that a difference circuit is averaged over, at most, where it finds them itself."""
PER_SOURCE = 6
"""Replacements of a word from each of the three places, at most."""
LIKELIEST = 10
"""A content word of the prompt among so many likeliest tokens is the rival of the answer."""
LOGITS_AT_ONCE = 64_000_000
"""Output logits of changed prompts that exist at a time (256 MB in float32)."""
COSINES_AT_ONCE = 16_000_000
"""Cosines of tokens with the whole vocabulary that exist at a time."""

WordKind = Literal["content", "function", "punctuation"]
Source = Literal["prompt", "likely", "neighbour"]
Reason = Literal["answer", "relation", "other"]
"""What an exchange shows: what is copied (the answer's own word), why it is found (a repeated word), or neither."""


@dataclass(frozen=True)
class Word:
    """A word of a prompt: one token, or several that are exchanged as a whole."""

    text: str
    positions: tuple[int, ...]
    kind: WordKind


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

    def __str__(self) -> str:
        return f"{self.before!r} -> {self.after!r}"


@dataclass(frozen=True)
class Measured:
    """All replacements of a prompt that were run."""

    asked: ResolvedRequest
    words: tuple[Word, ...]
    value: float
    """The metric on the prompt itself."""
    changes: tuple[Replacement, ...]

    @property
    def flips(self) -> tuple[Replacement, ...]:
        """The changes that flip the answer: one word before two, content words first, then the most natural."""
        kinds = {word.positions: word.kind for word in self.words}
        found = [change for change in self.changes if change.flips]

        def order(change: Replacement) -> tuple[bool, bool, float, str]:
            pair = change.positions not in kinds
            return pair, kinds.get(change.positions) != "content", -change.naturalness, change.text

        return tuple(sorted(found, key=order))

    def of(self, word: Word) -> tuple[Replacement, ...]:
        """The changes of one word alone."""
        return tuple(change for change in self.changes if change.positions == word.positions)

    def by_token(self, length: int) -> tuple[float | None, ...]:
        """The mean loss of each token's word; None where nothing was exchanged."""
        means = {
            position: fmean([change.effect for change in changes])
            for word in self.words
            if (changes := self.of(word))
            for position in word.positions
        }
        return tuple(means.get(i) for i in range(length))

    def counterfactuals(self, most: int = COUNTERFACTUALS) -> tuple[Replacement, ...]:
        """Changes to compare the prompt with: natural flips of both kinds (what is copied; why it is found), of
        different words as far as there are any, the words that matter most first. Without a flip, the strongest
        changes."""
        mean = {
            word.positions: fmean([c.effect for c in own]) for word in self.words if (own := self.of(word))
        }
        if not self.flips:
            strong = sorted(self.changes, key=lambda each: (-abs(each.effect), each.text))
            return tuple([each for each in strong if each.effect != 0] or strong[:1])[: max(1, most // 2)]
        singles = [each for each in self.flips if each.positions in mean] or list(self.flips)
        content = {word.positions for word in self.words if word.kind == "content"}
        singles = [each for each in singles if each.positions in content] or singles
        ranked: dict[str, list[Replacement]] = {}
        for each in singles:
            ranked.setdefault("answer" if each.reason == "answer" else "other", []).append(each)
        found: list[Replacement] = []
        for chosen in ranked.values():
            by_word: dict[tuple[int, ...], list[Replacement]] = {}
            for each in chosen:
                by_word.setdefault(each.positions, []).append(each)
            words = sorted(by_word.values(), key=lambda some: -abs(mean.get(some[0].positions, 0.0)))
            turns = [each for row in zip_longest(*words) for each in row if each is not None]
            found += turns[: max(1, most // len(ranked))]
        return tuple(found)


# -- what is asked -------------------------------------------------------------------------------------------


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
    """The strongest rival of an answer: a content word of the prompt if one is among the ten likeliest tokens, else the
    likeliest token that does not spell the answer as well."""
    special = _special(model)
    taken = {_plain(label) for label in model.token_labels(answer)}
    order = [token for token in logits.argsort(descending=True)[:64].tolist() if token not in special]
    labels = dict(zip(order, model.token_labels(order), strict=True))
    free = [token for token in order if token not in answer and _plain(labels[token]) not in taken]
    if not free:
        raise InputError("No other token rivals the answer: give a wrong answer.")
    words = {_plain(word.text) for word in words_of(model, ids) if word.kind == "content"}
    near = [token for token in free if token in order[:LIKELIEST] and _plain(labels[token]) in words]
    return ((near or free)[0],)


def _plain(text: str) -> str:
    return text.strip().lower()


def _special(model: Model) -> set[int]:
    return set() if model.tokenizer is None else set(model.tokenizer.all_special_ids)


def words_of(model: Model, ids: Sequence[int]) -> tuple[Word, ...]:
    """The words of a prompt; special tokens and bare spaces are none. Without a tokenizer every token is one.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> [word.text for word in words_of(model, model.to_ids("When Mary went to the"))]
    ['When', 'Mary', 'went', 'to', 'the']
    """
    labels, special = model.token_labels(ids), _special(model)
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


# -- replacements --------------------------------------------------------------------------------------------


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
            special, kinds = _special(model), dict[Any, int]()
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


class _Search:
    """Finds replacements of the words of one prompt."""

    def __init__(self, model: Model, asked: ResolvedRequest, recording: Recording, seed: int) -> None:
        self.model, self.asked, self.ids = model, asked, asked.ids
        self.vocabulary = _Vocabulary.of(model)
        self.log_probs = recording.logits[0].log_softmax(-1)
        self.generator = torch.Generator().manual_seed(seed)
        tail = len(asked.ids) - len(asked.root.answer_prefix)
        self.words = tuple(word for word in words_of(model, self.ids) if word.positions[-1] < tail)
        own = asked.root.answer if isinstance(asked.root, LogitDifference | Likelihood) else ()
        self.answer = {_plain(label) for label in model.token_labels(own)}
        counts = [_plain(word.text) for word in self.words]
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
            logits = self.model.end_logits([[*self.ids[:first], *row] for row in rows])
            best = logits.masked_fill(~self._same_shape(place), -torch.inf).argmax(-1).tolist()
            rows = [[*row, token] for row, token in zip(rows, best, strict=True)]
        return [tuple(row) for row in rows]

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
        text = " ".join(self.model.token_labels(ids))
        if tokenizer is not None:
            text = decoded(tokenizer, ids)
            if self._spans is not None and self.asked.text is not None:
                start, end = self._spans[word.positions[0]][0], self._spans[word.positions[-1]][1]
                old = self.asked.text[start:end]
                text = self.asked.text[:start] + old.replace(old.strip(), after) + self.asked.text[end:]
                if list(encode(tokenizer, [text])[0].ids) != ids[: len(self._spans)]:
                    return None
        again = word.kind == "content" and _plain(word.text) in self.repeated
        reason: Reason = "relation" if again else "other"
        reason = "answer" if _plain(word.text) in self.answer else reason
        return Replacement(word.positions, word.text, after, tuple(ids), text, source, reason)


# -- measuring -----------------------------------------------------------------------------------------------


def measure(
    model: Model,
    asked: ResolvedRequest,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    progress: Progress | None = None,
) -> Measured:
    """Run a prompt with its words exchanged, one at a time; if nothing flips the answer, the strongest in pairs.

    At most ``budget`` changed prompts are run. Words where a replacement changes the metric most to first order get
    most of them, content words before function words.
    """
    if budget < 1:
        raise InputError(f"budget={budget}: at least one changed prompt must be run.")
    with model.assume_weights_unchanged():
        recording = model.record([asked.ids], keep=("residuals", "patterns"))
        search = _Search(model, asked, recording, seed)
        candidates = {word: search.replacements(word) for word in search.words}
        if not any(candidates.values()):
            raise InputError(
                "No word of this prompt has a replacement of the same shape: give counterfactual prompts of your own."
            )
        singles = budget - budget // 6 if len(search.words) > 1 else budget
        chosen = _within(candidates, _first_order(model, asked.root, recording), search, singles)
        run = _Runner(model, asked, recording)
        changes = run(chosen, progress)
        if not any(change.flips for change in changes) and budget > len(changes):
            changes += run(_pairs(changes, budget - len(changes)), progress)
    return Measured(asked, search.words, run.value, tuple(changes))


def _within(
    candidates: dict[Word, list[Replacement]],
    gradient: Float[Tensor, "token d_model"],
    search: _Search,
    budget: int,
) -> list[Replacement]:
    """Replacements that are run: in turn from all words, the most promising word first, and of that all."""
    embedding: Any = search.model.hf.get_input_embeddings()
    table: Tensor = embedding.weight.detach().to(gradient)

    def promise(change: Replacement) -> float:
        places = list(change.positions)
        new, old = [change.ids[i] for i in places], [search.ids[i] for i in places]
        return abs(float(((table[new] - table[old]) * gradient[places]).sum()))

    rank = {"content": 0, "function": 1, "punctuation": 2}
    strongest = {word: max(map(promise, found), default=0.0) for word, found in candidates.items()}
    order = sorted(candidates, key=lambda word: (rank[word.kind], -strongest[word], word.positions))
    return [each for row in zip_longest(*(candidates[word] for word in order)) for each in row if each][
        :budget
    ]


def _pairs(changes: Sequence[Replacement], most: int) -> list[Replacement]:
    """Two exchanges at once: the strongest of different words together."""
    best: dict[tuple[int, ...], list[Replacement]] = {}
    for change in sorted(changes, key=lambda each: -abs(each.effect)):
        best.setdefault(change.positions, []).append(change)
    strong = [change for found in list(best.values())[:6] for change in found[:3]]
    found: list[Replacement] = []
    for one, two in combinations(strong, 2):
        if one.positions != two.positions and (one.effect > 0) == (two.effect > 0):
            places = {i: two.ids[i] for i in two.positions}
            ids = tuple(places.get(i, token) for i, token in enumerate(one.ids))
            found.append(
                replace(
                    one,
                    positions=(*one.positions, *two.positions),
                    before=f"{one.before} + {two.before}",
                    after=f"{one.after} + {two.after}",
                    ids=ids,
                    text="",
                )
            )
    return found[:most]


class _AtEmbedding(Observer):
    """Puts a tensor of its own in the place of the first layer's input, to differentiate with respect to it."""

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> Tensor | None:
        return self.residual if layer == 0 else None


def _first_order(model: Model, root: Root, recording: Recording) -> Float[Tensor, "token d_model"]:
    """The gradient of the metric with respect to what the embedding writes."""
    metric = root.metric(recording)
    assert metric is not None
    leaf = recording.residuals[0].detach().clone().requires_grad_()
    seen = metric.reading()
    keep = None
    if metric.positions:
        keep = torch.tensor([metric.positions], device=model.device)
    logits = forward(model, recording.token_ids, _AtEmbedding(leaf), seen, keep=keep, grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(seen.value(logits).sum(), leaf)[0][0]


class _Runner:
    """Runs changed prompts: their metric, their log-likelihood, and whether the answer flips.

    A change leaves everything before it as it is: where the metric reads logits, only tokens from the first changed one
    on are run, behind the keys and values of the prompt itself.
    """

    def __init__(self, model: Model, asked: ResolvedRequest, recording: Recording) -> None:
        self.model, self.asked = model, asked
        metric = asked.root.metric(recording)
        assert metric is not None
        self.metric = metric
        self.ids = torch.tensor([asked.ids], device=model.device)
        self.kept = None
        self.told = torch.zeros_like(self.ids[:, 1:], dtype=model.dtype)
        if isinstance(asked.root, LogitDifference | Likelihood):
            self.logits, self.kept = forward_keeping(model, self.ids)
            self.told = _told(self.logits, self.ids)
        values, likelihoods, answers = self._pass(self.ids, 0)
        self.value, self.likelihood, self.answer = values[0], likelihoods[0], answers[0]

    def __call__(self, changes: Sequence[Replacement], progress: Progress | None) -> list[Replacement]:
        found: dict[int, Replacement] = {}
        length = len(self.asked.ids)
        for start, members in self._groups(changes):
            step = max(1, LOGITS_AT_ONCE // ((length - start) * self.model.d_output))
            for first in range(0, len(members), step):
                some = members[first : first + step]
                ids = torch.tensor([changes[i].ids for i in some], device=self.model.device)
                for i, *measured in zip(some, *self._pass(ids, start), strict=True):
                    found[i] = self._measured(changes[i], *measured)
                if progress is not None:
                    progress(len(found), len(changes))
        return [found[i] for i in range(len(changes))]

    def _measured(self, change: Replacement, value: float, likelihood: float, answer: Any) -> Replacement:
        flips = answer != self.answer
        if isinstance(self.asked.root, LogitDifference):
            flips = (value > 0) != (self.value > 0)
        return replace(
            change,
            text=change.text or " ".join(self.model.token_labels(change.ids)),
            value=value,
            effect=self.value - value,
            naturalness=likelihood - self.likelihood,
            flips=flips,
        )

    def _groups(self, changes: Sequence[Replacement]) -> list[tuple[int, list[int]]]:
        """Which changes run together, and from which token on: as few tokens in as few passes as is cheapest."""
        if self.kept is None:
            return [(0, list(range(len(changes))))]
        length = len(self.asked.ids)
        return cheapest_groups(
            [min(change.positions) for change in changes], lambda n, start: PASS_TOKENS + n * (length - start)
        )

    @torch.inference_mode()
    def _pass(
        self, ids: Int[Tensor, "change token"], start: int
    ) -> tuple[list[float], list[float], list[Any]]:
        """Metric, log-likelihood and likeliest tokens of prompts that are the prompt itself before ``start``."""
        seen = self.metric.reading()
        if start and self.kept is not None:
            logits = forward_behind(self.model, self.kept, start, ids[:, start:])
            # What the token before the first changed one predicts is the same for all.
            before = self.logits[:, start - 1 : start].expand(len(ids), -1, -1)
            told = self.told[:, : start - 1].sum(-1) + _told(before, ids[:, start - 1 : start + 1]).sum(-1)
            told = told + _told(logits, ids[:, start:]).sum(-1)
        else:
            logits = forward(self.model, ids, seen)
            told = _told(logits, ids).sum(-1)
        positions = [position - start for position in self.metric.positions]
        values = seen.value(logits[:, positions] if positions else logits)
        at = positions or [logits.shape[1] - 1]
        return values.tolist(), told.tolist(), logits[:, at].argmax(-1).tolist()


def _told(logits: Float[Tensor, "row token vocab"], ids: Int[Tensor, "row token_or_one_more"]) -> Tensor:
    """The log-probability of each token after the first, given those before it."""
    logits = logits[:, : ids.shape[1] - 1]
    return logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)


def described(changes: Iterable[Replacement]) -> str:
    """Changes in one line: ``'John' -> 'Anna', 'Mary' -> 'Emma'``."""
    return ", ".join(map(str, changes))
