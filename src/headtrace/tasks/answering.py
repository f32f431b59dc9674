"""How often a model prefers the right answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.models import Model, load
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.statistics import Proportion
from headtrace.tasks.examples import TaskSet

if TYPE_CHECKING:
    import polars as pl
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
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

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} [{low:.1%}, {high:.1%}]"

    def frame(self) -> pl.DataFrame:
        """A row for all prompts and for each value of each label: how often the answer beats the wrong one."""
        import polars as pl

        found = [
            ("", "", self),
            *((label, value, each) for label, some in self.by_label.items() for value, each in some.items()),
        ]
        rows = [{"label": label, "value": value, **_plain(each)} for label, value, each in found]
        return pl.DataFrame(rows)

    def __repr__(self) -> str:
        return f"Accuracy({self.task!r}: {self} of {self.total} prompts)"

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return paragraph(repr(self)) + frame(self.frame())

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values, as ``--json`` prints it."""
        return {
            "task": self.task,
            "variant": self.variant,
            **_plain(self),
            "top1": _plain(self.top1),
            "mean_logit_difference": self.mean_logit_difference,
            "by_label": {
                label: {value: _plain(each) for value, each in values.items()}
                for label, values in self.by_label.items()
            },
            "excluded": self.excluded,
        }


def _plain(found: Proportion) -> dict[str, object]:
    """Counts, rate and interval as ``--json`` prints them."""
    return {
        "correct": found.count,
        "total": found.total,
        "rate": found.value,
        "wilson_95": list(found.interval),
    }


def accuracy(
    model: Model | PreTrainedModel,
    task_set: TaskSet,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Accuracy:
    """Accuracy of a model on a task; takes a ``headtrace.Model``, or a Hugging Face model that ``load`` takes.

    ``batch_size`` is the largest number of prompts in one forward pass; without it, only their tokens are bounded.

    >>> import headtrace
    >>> from headtrace.tasks import load_task
    >>> model = headtrace.load("builtin")
    >>> print(accuracy(model, load_task("ioi", model.tokenizer)))
    100.0% [98.7%, 100.0%]
    """
    if not len(task_set):
        raise InputError(f"The set of task '{task_set.task}' is empty: there is nothing to measure.")
    opened = model if isinstance(model, Model) else load(model)
    scores = dict(_scores(opened, task_set, batch_size, progress))
    ordered = [scores[place] for place in range(len(task_set))]
    right = [difference > 0 for difference, _ in ordered]
    return Accuracy(
        count=sum(right),
        total=len(right),
        top1=Proportion(sum(first for _, first in ordered), len(ordered)),
        mean_logit_difference=sum(difference for difference, _ in ordered) / len(ordered),
        by_label=_by_label(task_set, right),
        task=task_set.task,
        variant=task_set.variant,
        excluded=len(task_set.excluded),
    )


def _scores(
    model: Model, task_set: TaskSet, batch_size: int | None, progress: Progress | None
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """For each example: by how much the answer beats the wrong one, and whether it is the first choice."""
    done = 0
    for places in batches([len(example.token_ids) for example in task_set], prompts_at_once=batch_size):
        ends = model.end_logits([task_set[place].token_ids for place in places])
        for logits, place in zip(ends, places, strict=True):
            example = task_set[place]
            right = logits[list(example.answer_ids)].logsumexp(0)
            wrong = logits[list(example.wrong_ids)].logsumexp(0)
            yield place, (float(right - wrong), int(logits.argmax()) in example.answer_ids)
        done += len(places)
        if progress is not None:
            progress(done, len(task_set))


def _by_label(task_set: TaskSet, right: list[bool]) -> dict[str, dict[str, Proportion]]:
    found: dict[str, dict[str, Proportion]] = {}
    for label in sorted({key for example in task_set for key in example.labels}):
        values: dict[str, list[bool]] = {}
        for example, ok in zip(task_set, right, strict=True):
            values.setdefault(example.labels.get(label, ""), []).append(ok)
        found[label] = {value: Proportion(sum(oks), len(oks)) for value, oks in sorted(values.items())}
    return found
