"""What heads do, by where they look: simple attention scores.

>>> import headtrace
>>> scores = score_heads(headtrace.load("builtin"))
>>> sorted((best.layer, best.head) for best in scores.top("induction", 4))
[(1, 0), (1, 1), (1, 2), (1, 3)]
>>> print(scores.top("previous", 1)[0])
L0H1 0.83

Each score is a mean attention weight, in [0, 1]:

- ``previous``: from every token to the one before it (on IOI prompts);
- ``duplicate``: from a token to its earlier occurrence (on random tokens said twice);
- ``induction``: from a token to the one after its earlier occurrence (likewise);
- ``subject``: from the end to the subject's second mention, S2 (on IOI prompts; in the published circuit
  the S-inhibition heads look there);
- ``name_moving``: from the end to the indirect object, IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models import Model, load
from headtrace.prompts import batches, encode, is_unknown
from headtrace.tasks.registry import load_task
from headtrace.tasks.words import Draw
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    import polars as pl
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headtrace.tasks.examples import TaskSet

SCORES = ("previous", "duplicate", "induction", "subject", "name_moving")


@dataclass(frozen=True)
class HeadScore:
    """One head's score."""

    layer: int
    head: int
    score: float

    def __str__(self) -> str:
        return f"{head_name(self.layer, self.head)} {self.score:.2f}"


@dataclass(frozen=True, repr=False)
class HeadScores:
    """Scores of all heads, by name."""

    scores: dict[str, Float[Tensor, "layers heads"]]

    def frame(self) -> pl.DataFrame:
        """A row per head: its name, layer, head, and one column for each score."""
        import polars as pl

        first = next(iter(self.scores.values()))
        layers, heads = torch.cartesian_prod(*(torch.arange(n) for n in first.shape)).T.tolist()
        names = [head_name(*place) for place in zip(layers, heads, strict=True)]
        places = {"name": names, "layer": layers, "head": heads}
        return pl.DataFrame(
            {**places, **{name: table.flatten().tolist() for name, table in self.scores.items()}}
        )

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {self.top(name, 1)[0]}" for name in self.scores)
        return f"HeadScores({best})"

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return paragraph(repr(self)) + frame(self.frame())

    def top(self, name: str, k: int = 5) -> list[HeadScore]:
        """The ``k`` heads that do this most."""
        if name not in self.scores:
            raise InputError(f"There is no head score {name!r}. Use one of: {', '.join(self.scores)}.")
        table = self.scores[name]
        values, flat = table.flatten().topk(min(k, table.numel()))
        heads = table.shape[1]
        return [
            HeadScore(int(index) // heads, int(index) % heads, float(value))
            for value, index in zip(values, flat, strict=True)
        ]


def score_heads(
    model: Model | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    n_per_cell: int = 2,
    n_repeats: int = 32,
    repeat_length: int = 10,
    seed: int = 0,
) -> HeadScores:
    """Score every head of a ``headtrace.Model``, or of a Hugging Face model that ``load`` takes, with its tokenizer."""
    opened = model if isinstance(model, Model) else load(model, tokenizer=tokenizer)
    reader: PreTrainedTokenizerBase = opened.tokenizer if tokenizer is None else tokenizer
    task_set = load_task("ioi", reader, n_per_cell=n_per_cell, seed=seed)
    # Random tokens stand where a text would: behind what the tokenizer puts in front of one.
    (text,) = encode(reader, [task_set[0].text])
    halves = _random_tokens(reader, n_repeats, repeat_length, seed)
    return HeadScores({**_on_repeats(opened, text.ids[: text.front], halves), **_on_ioi(opened, task_set)})


def _on_repeats(
    model: Model, front: Sequence[int], halves: list[list[int]]
) -> dict[str, Float[Tensor, "layers heads"]]:
    """Random tokens, said twice."""
    length = len(halves[0])
    patterns = [
        pattern
        for places in batches([len(front) + 2 * length] * len(halves))
        for pattern in _patterns(model, [[*front, *halves[place], *halves[place]] for place in places])
    ]
    attention = torch.stack(patterns)
    second = torch.arange(len(front) + length, len(front) + 2 * length)
    return {
        "duplicate": attention[..., second, second - length].mean((0, -1)),
        "induction": attention[..., second[:-1], second[:-1] - length + 1].mean((0, -1)),
    }


def _on_ioi(model: Model, task_set: TaskSet) -> dict[str, Float[Tensor, "layers heads"]]:
    found: dict[str, list[Tensor]] = {"previous": [], "subject": [], "name_moving": []}
    for places in batches([len(example.token_ids) for example in task_set]):
        examples = [task_set[place] for place in places]
        attention = _patterns(model, [example.token_ids for example in examples])
        for example, pattern in zip(examples, attention, strict=True):
            from_end = pattern[:, :, example.roles["end"]]
            found["previous"].append(pattern.diagonal(-1, -2, -1).mean(-1))
            found["subject"].append(from_end[..., example.roles["S2"]])
            found["name_moving"].append(from_end[..., example.roles["IO"]])
    return {name: torch.stack(each).mean(0) for name, each in found.items()}


def _patterns(model: Model, ids: Sequence[Sequence[int]]) -> list[Float[Tensor, "layers heads dest src"]]:
    """Where every head attends on each prompt, without the padding."""
    recording = model.record(ids, last_logits=True, keep=["patterns"])
    return [recording.patterns[:, row, :, :n, :n].cpu() for row, n in enumerate(recording.lengths)]


def _random_tokens(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int) -> list[list[int]]:
    """Rows of different ordinary tokens."""
    special = set(tokenizer.all_special_ids)
    ordinary = [
        token for token in range(len(tokenizer)) if token not in special and not is_unknown(tokenizer, token)
    ]
    draw = Draw("repeats", seed)
    return [draw.sample(ordinary, length) for _ in range(count)]
