"""Which tokens are attention sinks, and how much attention goes where.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> texts = ["When Mary and John went", "The capital of France is"]
>>> [(prompt.task, prompt.length) for prompt in as_sink_prompts(model, texts)]
[('prompts', 6), ('prompts', 6)]
>>> [kind_of(token) for token in (",", " Mary", " 1581", "\\n", "<s>")]
['punctuation', 'word', 'number', 'space', 'special']

Sinks are the first token, and tokens that receive much attention wherever they stand. A destination's attention is a
distribution over the tokens it sees, so the masses on all kinds of tokens (``KINDS``, with the destination itself as
one of them) sum to one. A head's mass is the mean over destinations past the first token of a prompt, then over
prompts; intervals resample prompts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.devices import on_host
from headtrace.prompts import as_prompts
from headtrace.request import ResolvedRequest
from headtrace.statistics import intervals
from headtrace.tasks import Example, TaskSet
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

UNNAMED = "prompts"
"""The task of prompts that come without one."""

SinkPrompts = TaskSet | Sequence[Any] | Mapping[str, Any] | Prompt
"""A task set, or several; prompts, examples or resolved requests; or any of these by the name of their task."""
FIRST, ITSELF, SINKS = "first", "itself", "sinks"
KINDS = (FIRST, ITSELF, "punctuation", "number", "space", "special", "word")
"""Where attention can go: every pair of destination and source is of one kind."""
LEAST_SEEN = 2
"""A token is judged only where at least this many later tokens see it: seen from the last token alone, the one before
it looks like a sink, because many heads attend to the previous token."""


@dataclass(frozen=True)
class SinkPrompt:
    """One prompt, the task that it belongs to, and the tokens that are right and wrong after it."""

    task: str
    ids: tuple[int, ...]
    right: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.ids)


def as_sink_prompts(model: Model, prompts: SinkPrompts) -> list[SinkPrompt]:
    """All given prompts as one list; a prompt of one token is an error."""
    cases = list(_cases(model, prompts, UNNAMED))
    if not cases:
        raise InputError("There are no prompts: give some texts, token ids, or the sets of a task.")
    for place, case in enumerate(cases):
        if case.length < 2:
            raise InputError(
                f"Prompt {place} ({'|'.join(model.token_labels(case.ids))!r}) has one token, which can attend only to "
                "itself: a sink needs at least two. Give longer prompts."
            )
    return cases


def _cases(model: Model, given: Any, task: str) -> Iterator[SinkPrompt]:
    if isinstance(given, TaskSet):
        yield from _cases(model, list(given), given.task)
    elif isinstance(given, Example):
        yield SinkPrompt(task, given.token_ids, given.answer_ids, given.wrong_ids)
    elif isinstance(given, ResolvedRequest):
        answers: Any = given.root if given.root.kind == "linear" else None
        right, wrong = ((), ()) if answers is None else (tuple(answers.answer), tuple(answers.wrong))
        yield SinkPrompt(task, tuple(given.ids), right, wrong)
    elif isinstance(given, Mapping) and "input_ids" not in given:
        for name, group in given.items():
            yield from _cases(model, group, str(name))
    elif isinstance(given, Sequence) and any(
        isinstance(each, (TaskSet, Example, ResolvedRequest)) for each in given
    ):
        for each in given:
            yield from _cases(model, each, task)
    elif not isinstance(given, Sequence) or len(given):
        yield from (SinkPrompt(task, tuple(model.to_ids(prompt))) for prompt in as_prompts(given))


# -- which tokens are sinks ----------------------------------------------------------------------------------


def kind_of(text: str) -> str:
    """What a token looks like."""
    bare = text.strip()
    if not bare:
        return "space"
    if len(bare) > 2 and bare[0] == "<" and bare[-1] == ">":
        return "special"
    if any(each.isdigit() for each in bare):
        return "number"
    if not any(each.isalpha() for each in bare):
        return "punctuation" if unicodedata.category(bare[0])[0] in "PS" else "special"
    return "word"


def kinds_of(model: Model, ids: Sequence[int]) -> list[str]:
    """The kind of each token of a prompt; the first is ``first`` whatever it is."""
    special: list[int] = getattr(model.tokenizer, "all_special_ids", None) or []
    labels = model.token_labels(ids)
    found = ["special" if i in special else kind_of(text) for i, text in zip(ids, labels, strict=True)]
    return [FIRST, *found[1:]]


@dataclass(frozen=True)
class SinkRule:
    """What counts as a sink: the first token, and every token id that is listed."""

    ids: frozenset[int]
    threshold: float

    def positions(self, ids: Sequence[int]) -> list[int]:
        return [place for place, each in enumerate(ids) if place == 0 or each in self.ids]

    def mask(self, cases: Sequence[SinkPrompt], length: int) -> Bool[Tensor, "prompt token"]:
        """Sink positions of some prompts that run together."""
        found = torch.zeros(len(cases), length, dtype=torch.bool)
        for row, case in enumerate(cases):
            found[row, self.positions(case.ids)] = True
        return found


def incoming(recording: Recording, prompt: int) -> Float[Tensor, " token"]:
    """Attention that each token receives: the mean over all heads and over the later tokens that see it."""
    n = recording.lengths[prompt]
    later = torch.ones(n, n, dtype=torch.bool, device=recording.patterns.device).tril(-1)
    total, seen = recording.patterns.new_zeros(n), recording.patterns.new_zeros(n)
    for layer, mask in enumerate(recording.visible):
        visible = mask[prompt, :n, :n] & later
        total += (recording.patterns[layer, prompt, :, :n, :n].mean(0) * visible).sum(0)
        seen += visible.sum(0)
    return total / seen.clamp_min(1)


def token_table(model: Model, cases: Sequence[SinkPrompt], received: Sequence[Tensor]) -> pl.DataFrame:
    """A row per token of the vocabulary that occurs (past the first place), and one for the first place; most first.

    ``received`` has what ``incoming`` gives for each prompt, which may have any length.
    """
    sums: dict[int | None, list[float]] = {}
    for case, values in zip(cases, received, strict=True):
        for place, value in enumerate(values.tolist()):
            if place == 0 or place < case.length - LEAST_SEEN:
                sums.setdefault(None if place == 0 else case.ids[place], []).append(value)
    rows = [
        {
            "token_id": key,
            "token": FIRST if key is None else model.token_labels([key])[0],
            "kind": FIRST if key is None else kinds_of(model, [0, key])[1],
            "incoming": sum(values) / len(values),
            "occurrences": len(values),
        }
        for key, values in sums.items()
    ]
    schema = {"token_id": pl.Int64, "token": pl.String, "kind": pl.String}
    schema |= {"incoming": pl.Float64, "occurrences": pl.Int64}
    return pl.DataFrame(rows, schema=schema).sort(
        "incoming", "token_id", descending=[True, False], nulls_last=False
    )


def sinks_in(table: pl.DataFrame, threshold: float, prompts: int) -> SinkRule:
    """The first place, and tokens above the threshold that occur in enough prompts (a tenth) not to be an accident."""
    often = max(2, prompts // 10)
    chosen = table.filter(
        pl.col("token_id").is_not_null()
        & (pl.col("incoming") >= threshold)
        & (pl.col("occurrences") >= often)
    )
    return SinkRule(frozenset(chosen["token_id"].to_list()), threshold)


# -- attention on sinks --------------------------------------------------------------------------------------


def kind_masses(recording: Recording, prompt: int, kinds: Sequence[str]) -> Float[Tensor, "layer head kind"]:
    """Where each head's attention goes in one prompt, by kind of source."""
    n = recording.lengths[prompt]
    patterns = recording.patterns[:, prompt, :, 1:n, :n]
    itself = torch.eye(n, dtype=torch.bool, device=patterns.device)[1:]
    of_kind = torch.tensor([KINDS.index(kind) for kind in kinds], device=patterns.device)
    places = torch.where(itself, KINDS.index(ITSELF), of_kind)
    one_hot = torch.nn.functional.one_hot(places, len(KINDS)).to(patterns.dtype)
    return torch.einsum("lhds,dsk->lhk", patterns, one_hot) / (n - 1)


def sink_mass(
    pattern: Float[Tensor, "batch head dest src"],
    sinks: Bool[Tensor, "batch src"],
    lengths: Sequence[int],
) -> Float[Tensor, "batch head"]:
    """Mean attention of destinations past the first token on sinks before them, in one layer."""
    total = pattern.shape[-1]
    before = torch.ones(total, total, dtype=torch.bool, device=pattern.device).tril(-1)
    real = torch.arange(total, device=pattern.device) < torch.tensor(lengths, device=pattern.device)[:, None]
    counted = sinks[:, None, :] & before & real[:, :, None]
    on_sinks = torch.einsum("bhds,bds->bh", pattern, counted.to(pattern.dtype))
    return on_sinks / (torch.tensor(lengths, device=pattern.device)[:, None] - 1)


def mass_table(
    by_kind: Float[Tensor, "prompt layer head kind"],
    on_sinks: Float[Tensor, "prompt layer head"],
    seed: int,
) -> pl.DataFrame:
    """A row per head and kind (``sinks``: all sink positions together), with a 95 % interval over prompts."""
    values = on_host(torch.cat((on_sinks[..., None], by_kind), dim=-1)).numpy()
    mean, (low, high) = values.mean(0), intervals(values, seed)
    rows = [
        (layer, head, kind, *(float(part[layer, head, k]) for part in (mean, low, high)))
        for layer in range(values.shape[1])
        for head in range(values.shape[2])
        for k, kind in enumerate((SINKS, *KINDS))
    ]
    return pl.DataFrame(rows, schema=["layer", "head", "kind", "mass", "low", "high"], orient="row")
