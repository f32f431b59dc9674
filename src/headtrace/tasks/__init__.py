"""Prompts with known answers: IOI, greater-than, gendered pronoun, facts, and your own JSONL.

>>> import headtrace
>>> from headtrace.tasks import accuracy, load_task
>>> model = headtrace.load("builtin")
>>> task_set = load_task("ioi", model.tokenizer, n_per_cell=2)
>>> accuracy(model, task_set).total
60
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.lazy import lazy_names
from headtrace.tasks.build import read_jsonl
from headtrace.tasks.counterfactuals import Counterfactual, CounterfactualSet, counterfactuals
from headtrace.tasks.examples import Example, Exclusion, TaskSet
from headtrace.tasks.registry import TASKS, Task, load_task, register_task

if TYPE_CHECKING:
    from headtrace.tasks.answering import Accuracy, Proportion, accuracy
    from headtrace.tasks.head_scores import HeadScores, score_heads

# These need torch, which is loaded on first use only.
_NEED_TORCH = {
    "Accuracy": "answering",
    "Proportion": "answering",
    "accuracy": "answering",
    "HeadScores": "head_scores",
    "score_heads": "head_scores",
}

__all__ = [
    "TASKS",
    "Accuracy",
    "Counterfactual",
    "CounterfactualSet",
    "Example",
    "Exclusion",
    "HeadScores",
    "Proportion",
    "Task",
    "TaskSet",
    "accuracy",
    "counterfactuals",
    "load_task",
    "read_jsonl",
    "register_task",
    "score_heads",
]

__getattr__ = lazy_names(__name__, _NEED_TORCH)
