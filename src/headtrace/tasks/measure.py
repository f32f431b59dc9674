"""How often a model prefers the right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.tasks.examples import Example, TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Proportion:
    """A number of successes out of a total, with its Wilson 95% interval.

    >>> Proportion(95, 100).interval
    (0.8882..., 0.9784...)
    """

    correct: int
    total: int

    @property
    def rate(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        share, n, z2 = self.rate, self.total, Z_95**2
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.1%} [{low:.1%}, {high:.1%}]"

    def to_dict(self) -> dict[str, Any]:
        return {
            "correct": self.correct,
            "total": self.total,
            "rate": self.rate,
            "wilson_95": list(self.interval),
        }


@dataclass(frozen=True)
class Accuracy(Proportion):
    """How often the answer beats the wrong one at the end position.

    Where a task has several right or wrong tokens, their probabilities are added up first.
    """

    top1: Proportion
    """How often the most likely token of the whole vocabulary is a right answer."""
    mean_logit_difference: float
    by_label: dict[str, dict[str, Proportion]]
    task: str = ""
    variant: str = "standard"
    excluded: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "variant": self.variant,
            **super().to_dict(),
            "top1": self.top1.to_dict(),
            "mean_logit_difference": self.mean_logit_difference,
            "by_label": {
                label: {value: each.to_dict() for value, each in values.items()}
                for label, values in self.by_label.items()
            },
            "excluded": self.excluded,
        }


def accuracy(
    model: PreTrainedModel | Any,
    task_set: TaskSet,
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> Accuracy:
    """Accuracy of a model on a task; takes a ``headtrace.Model`` or a Hugging Face causal LM.

    >>> model = headtrace.load("builtin")
    >>> print(accuracy(model, load_task("ioi", model.tokenizer)))
    99.7% [98.1%, 99.9%]
    """
    if not len(task_set):
        raise InputError(f"The set of task '{task_set.task}' is empty: there is nothing to measure.")
    scores = _score(getattr(model, "hf", model), task_set.examples, batch_size, progress)
    right = [difference > 0 for difference, _ in scores]
    by_label: dict[str, dict[str, Proportion]] = {}
    for label in sorted({key for example in task_set for key in example.labels}):
        values: dict[str, list[bool]] = {}
        for example, ok in zip(task_set, right, strict=True):
            values.setdefault(example.labels.get(label, ""), []).append(ok)
        by_label[label] = {value: Proportion(sum(oks), len(oks)) for value, oks in sorted(values.items())}
    return Accuracy(
        correct=sum(right),
        total=len(right),
        top1=Proportion(sum(top for _, top in scores), len(scores)),
        mean_logit_difference=sum(difference for difference, _ in scores) / len(scores),
        by_label=by_label,
        task=task_set.task,
        variant=task_set.variant,
        excluded=len(task_set.excluded),
    )


def end_logits(hf: PreTrainedModel, examples: Sequence[Example]) -> Float[Tensor, "examples vocabulary"]:
    """The next-token logits at the end of each prompt: one right-padded batch, padding masked."""
    lengths = [len(example.token_ids) for example in examples]
    ids = torch.zeros(len(examples), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : lengths[row]] = torch.tensor(example.token_ids)
        mask[row, : lengths[row]] = 1
    with torch.no_grad():
        output: Any = hf(input_ids=ids.to(hf.device), attention_mask=mask.to(hf.device), use_cache=False)
    rows = torch.arange(len(examples))
    return output.logits[rows, torch.tensor(lengths) - 1].float().cpu()


def _score(
    hf: PreTrainedModel,
    examples: Sequence[Example],
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[float, bool]]:
    """For each example: by how much the answer beats the wrong one, and whether it is the first choice."""
    # Prompts of like length share a batch, so that little is padded.
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].token_ids))
    scores: list[tuple[float, bool]] = [(0.0, False)] * len(examples)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        logits = end_logits(hf, [examples[index] for index in indices])
        for index, row in zip(indices, logits, strict=True):
            example = examples[index]
            right = row[list(example.answer_ids)].logsumexp(0)
            wrong = row[list(example.wrong_ids)].logsumexp(0)
            scores[index] = (float(right - wrong), int(row.argmax()) in example.answer_ids)
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order))
    return scores
