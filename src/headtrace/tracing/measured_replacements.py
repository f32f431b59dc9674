"""What replacements of the words of a prompt do to the number that a root reads, measured by running them.

All changed prompts run together; the same pass gives the metric and the log-likelihood of the changed prompt, its
*naturalness*. Changes that flip the answer are counterfactual prompts that nobody had to write.

>>> import headtrace
>>> from headtrace.tracing.prompt_words import ask
>>> model = headtrace.load("builtin")
>>> asked = ask(model, "When Mary and John went to the store, John gave a drink to")
>>> found = measure(model, asked, budget=60)
>>> change = found.flips[0]
>>> change.before, change.flips, len(change.ids) == len(asked.ids)
('Mary', True, True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.forward import forward, forward_behind, forward_keeping
from headtrace.models.observer import Observer, Rotary
from headtrace.progress import Progress
from headtrace.prompts import PASS_TOKENS, cheapest_groups
from headtrace.request import ResolvedRequest
from headtrace.roots import Likelihood, LogitDifference
from headtrace.tracing.prompt_words import Replacement, ReplacementSearch, Word, plain
from headtrace.vocabulary import FUNCTION_WORDS

if TYPE_CHECKING:
    from headtrace.causal.metric import MetricObserver
    from headtrace.models import Model, Recording
    from headtrace.roots import Root

BUDGET = 120
"""Changed prompts that are run, unless another number is given."""
COUNTERFACTUALS = 4
"""Changed prompts that a difference circuit is averaged over, at most, where it finds them itself."""
UNNATURAL = 10.0
"""Flips whose prompt is less likely than the most natural one by more nats than this are left out."""
LOGITS_AT_ONCE = 64_000_000
"""Output logits of changed prompts that exist at a time (256 MB in float32)."""


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
        different words as far as there are any, the words that matter most first. Without a flip, the changes that
        come closest to one."""
        mean = {
            word.positions: fmean([c.effect for c in own]) for word in self.words if (own := self.of(word))
        }
        if not self.flips:
            return self._closest()[: max(1, most // 2)]
        singles = [each for each in self.flips if each.positions in mean] or list(self.flips)
        content = {word.positions for word in self.words if word.kind == "content"}
        singles = [each for each in singles if each.positions in content] or singles
        # A function word in the place of a content word mostly breaks the sentence.
        whole = [
            each
            for each in singles
            if each.positions not in content or plain(each.after) not in FUNCTION_WORDS
        ]
        singles = whole or singles
        ranked: dict[str, list[Replacement]] = {}
        for each in singles:
            ranked.setdefault("answer" if each.reason == "answer" else "other", []).append(each)
        found: list[Replacement] = []
        for chosen in ranked.values():
            natural = max(each.naturalness for each in chosen) - UNNATURAL
            chosen = [each for each in chosen if each.naturalness >= natural]
            by_word: dict[tuple[int, ...], list[Replacement]] = {}
            for each in chosen:
                by_word.setdefault(each.positions, []).append(each)
            words = sorted(by_word.values(), key=lambda some: -abs(mean.get(some[0].positions, 0.0)))
            turns = [each for row in zip_longest(*words) for each in row if each is not None]
            found += turns[: max(1, most // len(ranked))]
        return tuple(found)

    @property
    def weakens(self) -> bool:
        """Whether any change brings the metric nearer to a flip."""
        return any(_towards_flip(self.asked.root, self.value, change) > 0 for change in self.changes)

    def _closest(self) -> tuple[Replacement, ...]:
        """Where nothing flips the answer: the changes that bring it closest to that, or else the strongest."""
        towards = {each: _towards_flip(self.asked.root, self.value, each) for each in self.changes}
        strong = sorted(towards, key=lambda each: (-towards[each], each.text))
        if self.weakens:
            return tuple(each for each in strong if towards[each] > 0)
        changing = [each for each in strong[::-1] if each.effect != 0]
        return tuple(changing or strong[:1])


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
        search = ReplacementSearch(model, asked, recording, seed)
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
            towards = {each: _towards_flip(asked.root, run.value, each) for each in changes}
            changes += run(_pairs(towards, budget - len(changes)), progress)
    return Measured(asked, search.words, run.value, tuple(changes))


def _within(
    candidates: dict[Word, list[Replacement]],
    gradient: Float[Tensor, "token d_model"],
    search: ReplacementSearch,
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


def _towards_flip(root: Root, value: float, change: Replacement) -> float:
    """How far a change brings the metric, whose value on the prompt is given, towards a flip of the answer."""
    return -change.effect if isinstance(root, LogitDifference) and value < 0 else change.effect


def _pairs(towards: Mapping[Replacement, float], most: int) -> list[Replacement]:
    """Two exchanges at once, of different words: those that bring the answer closest to a flip, by how far each does;
    if none does, the strongest."""
    changes = [each for each in towards if towards[each] > 0] or list(towards)
    best: dict[tuple[int, ...], list[Replacement]] = {}
    for change in sorted(changes, key=lambda each: -abs(each.effect)):
        best.setdefault(change.positions, []).append(change)
    strong = [change for found in list(best.values())[:6] for change in found[:3]]
    found: list[Replacement] = []
    for one, two in combinations(strong, 2):
        if one.positions != two.positions:
            places = {i: two.ids[i] for i in two.positions}
            ids = tuple(places.get(i, token) for i, token in enumerate(one.ids))
            found.append(
                replace(
                    one,
                    positions=(*one.positions, *two.positions),
                    before=f"{one.before} … {two.before}",
                    after=f"{one.after} … {two.after}",
                    ids=ids,
                    text="",
                    which=0,
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
        self.kept, seen = None, metric.reading()
        if isinstance(asked.root, LogitDifference | Likelihood):
            self.logits, self.kept = forward_keeping(model, self.ids)
        else:
            self.logits = forward(model, self.ids, seen)
        self.told = _told(self.logits, self.ids)
        measured = self._read(seen, self.logits, self.told.sum(-1), 0)
        self.value, self.likelihood, self.answer = (each[0] for each in measured)

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
        return self._read(seen, logits, told, start)

    def _read(
        self, seen: MetricObserver, logits: Tensor, told: Tensor, start: int
    ) -> tuple[list[float], list[float], list[Any]]:
        """Metric, log-likelihood and likeliest tokens from output logits at the tokens from ``start`` on."""
        positions = [position - start for position in self.metric.positions]
        values = seen.value(logits[:, positions] if positions else logits)
        at = positions or [logits.shape[1] - 1]
        return values.tolist(), told.tolist(), logits[:, at].argmax(-1).tolist()


def _told(logits: Float[Tensor, "row token vocab"], ids: Int[Tensor, "row token_or_one_more"]) -> Tensor:
    """The log-probability of each token after the first, given those before it."""
    logits = logits[:, : ids.shape[1] - 1]
    return logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
