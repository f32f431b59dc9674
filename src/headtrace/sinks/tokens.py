"""Which tokens are sinks: the first one, and whatever else takes much attention wherever it stands.

>>> [kind_of(token) for token in (",", " Mary", " 1581", "\\n", "<s>")]
['punctuation', 'word', 'number', 'space', 'special']
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.sinks.cases import Case

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

FIRST, ITSELF, SINKS = "first", "itself", "sinks"
KINDS = (FIRST, ITSELF, "punctuation", "number", "space", "special", "word")
"""Where attention can go: every pair of destination and source is of one kind."""
LEAST_SEEN = 2
"""A token counts for the search only where at least so many later tokens see it: from one of them alone, the token
before the last looks like a sink because heads look at the token before."""


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

    def mask(self, cases: Sequence[Case], length: int) -> Bool[Tensor, "prompt token"]:
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


def token_table(model: Model, cases: Sequence[Case], received: Sequence[Tensor]) -> pl.DataFrame:
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
