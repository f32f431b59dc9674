"""Accuracy is counted right, batched or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from headtrace.errors import InputError
from headtrace.tasks import Proportion, TaskSet, accuracy, load_task
from headtrace.tasks.measure import end_logits


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (0, 20), (7, 20), (20, 20), (2900, 3000)])
def test_wilson_interval_is_scipys(correct: int, total: int) -> None:
    expected = binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert Proportion(correct, total).interval == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_batch_of_different_lengths_gives_the_logits_of_single_prompts(
    builtin_model: Any, builtin_tokenizer: Any
) -> None:
    examples = load_task("ioi", builtin_tokenizer, n_per_cell=1).examples
    assert len({len(example.token_ids) for example in examples}) > 3
    alone = torch.stack(
        [builtin_model(torch.tensor([example.token_ids])).logits[0, -1] for example in examples]
    )
    torch.testing.assert_close(end_logits(builtin_model, examples), alone, atol=1e-4, rtol=1e-4)


class Constant(torch.nn.Module):
    """A model whose logits are always the same."""

    def __init__(self, logits: dict[int, float]) -> None:
        super().__init__()
        self.row = torch.zeros(500)
        for token, value in logits.items():
            self.row[token] = value
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        class Output:
            logits = self.row.expand(*input_ids.shape, -1)

        return Output()


def test_counts_by_hand(builtin_tokenizer: Any) -> None:
    base = load_task("facts", builtin_tokenizer, n_per_cell=1)[0]
    cases = [((10,), (11,), "a"), ((11,), (10,), "a"), ((12, 13), (10,), "b"), ((12,), (11,), "b")]
    examples = tuple(
        replace(base, answer_ids=right, wrong_ids=wrong, labels={"group": group})
        for right, wrong, group in cases
    )
    # Two tokens at 1.5 together outweigh one at 2, though neither is the first choice.
    result = accuracy(Constant({10: 2.0, 11: 1.0, 12: 1.5, 13: 1.5}), TaskSet("hand", examples), batch_size=3)
    assert (result.correct, result.total, result.top1.correct) == (3, 4, 1)
    assert {value: each.correct for value, each in result.by_label["group"].items()} == {"a": 1, "b": 2}
    outweighs = float(torch.tensor([1.5, 1.5]).logsumexp(0)) - 2.0
    assert result.mean_logit_difference == pytest.approx((1.0 - 1.0 + outweighs + 0.5) / 4)


def test_tie_is_not_a_success(builtin_tokenizer: Any) -> None:
    task_set = load_task("pronoun", builtin_tokenizer, n_per_cell=1)
    assert accuracy(Constant({}), task_set).correct == 0


def test_result_as_json(builtin_model: Any, builtin_tokenizer: Any) -> None:
    task_set = load_task("pronoun", builtin_tokenizer, n_per_cell=1)
    record = accuracy(builtin_model, task_set).to_dict()
    assert record["total"] == 8
    assert set(record["by_label"]) == {"form", "gender"}
    assert record["wilson_95"][0] <= record["rate"] <= record["wilson_95"][1]


def test_empty_set_is_refused(builtin_model: Any) -> None:
    with pytest.raises(InputError, match="empty"):
        accuracy(builtin_model, TaskSet("none", ()))
