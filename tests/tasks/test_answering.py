"""Accuracy is counted right, batched or not, and the model is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import headtrace
from headtrace import builtin
from headtrace.errors import InputError
from headtrace.tasks import Proportion, TaskSet, accuracy, load_task, score_heads


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (0, 20), (7, 20), (20, 20), (2900, 3000)])
def test_wilson_interval_holds_the_shares_that_are_not_rejected(correct: int, total: int) -> None:
    """At each end of the interval, the share seen is 1.96 standard errors of that end away."""
    seen = Proportion(correct, total)
    for end in seen.interval:
        error = (end * (1 - end) / total) ** 0.5
        # The two ends that 0 and all of them have lie on the boundary.
        assert end in (0.0, 1.0) or abs(seen.value - end) == pytest.approx(1.959964 * error, rel=1e-5)
    low, high = seen.interval
    assert 0 <= low <= seen.value <= high <= 1
    assert low < high


def test_the_logits_are_those_of_the_model_itself(builtin_tokenizer: Any) -> None:
    """In float64: batches of different lengths, padded, against one prompt after the other."""
    model = headtrace.load("builtin", dtype="float64")
    task_set = load_task("ioi", builtin_tokenizer, n_per_cell=1)
    assert len({len(example.token_ids) for example in task_set}) > 3
    differences: list[float] = []
    with torch.no_grad():
        for example in task_set:
            logits = model.hf(torch.tensor([example.token_ids])).logits[0, -1]
            differences.append(float(logits[example.answer_ids[0]] - logits[example.wrong_ids[0]]))
    expected = sum(differences) / len(differences)
    for batch_size in (None, 1, 7):
        result = accuracy(model, task_set, batch_size=batch_size)
        # Some ten sums in a row of up to 256 terms of size 100 and below: 10 x 256 x 100 x 2^-53 is 3e-11.
        assert result.mean_logit_difference == pytest.approx(expected, abs=1e-10)
        assert result.count == sum(difference > 0 for difference in differences)


def constant_model(logits: dict[int, float], vocabulary: int = 500) -> Any:
    """A model whose logits are always the same: its final norm gives the first unit vector whatever comes in."""
    config = GPT2Config(
        n_embd=4, n_layer=1, n_head=1, n_positions=64, vocab_size=vocabulary, tie_word_embeddings=False
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        model.lm_head.weight.zero_()
        for token, value in logits.items():
            model.lm_head.weight[token, 0] = value
    return model


def test_counts_by_hand(builtin_tokenizer: Any) -> None:
    base = load_task("facts", builtin_tokenizer, n_per_cell=1)[0]
    cases = [((10,), (11,), "a"), ((11,), (10,), "a"), ((12, 13), (10,), "b"), ((12,), (11,), "b")]
    examples = tuple(
        replace(base, answer_ids=right, wrong_ids=wrong, labels={"group": group})
        for right, wrong, group in cases
    )
    # Two tokens at 1.5 together outweigh one at 2, though neither is the first choice.
    model = constant_model({10: 2.0, 11: 1.0, 12: 1.5, 13: 1.5})
    result = accuracy(model, TaskSet("hand", examples), batch_size=3)
    assert (result.count, result.total, result.top1.count) == (3, 4, 1)
    assert {value: each.count for value, each in result.by_label["group"].items()} == {"a": 1, "b": 2}
    outweighs = float(torch.tensor([1.5, 1.5]).logsumexp(0)) - 2.0
    assert result.mean_logit_difference == pytest.approx((1.0 - 1.0 + outweighs + 0.5) / 4)


def test_tie_is_not_a_success(builtin_tokenizer: Any) -> None:
    task_set = load_task("pronoun", builtin_tokenizer, n_per_cell=1)
    assert accuracy(constant_model({}), task_set).count == 0


def test_progress_counts_the_examples(builtin_model: headtrace.Model) -> None:
    task_set = load_task("pronoun", builtin_model.tokenizer, n_per_cell=1)
    seen: list[tuple[int, int]] = []
    accuracy(builtin_model, task_set, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 8), (6, 8), (8, 8)]


def state(hf: Any) -> dict[str, Any]:
    """Everything about a module that running it could leave changed."""
    hooks = {
        (name, kind): list(getattr(module, kind))
        for name, module in hf.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
    }
    return {"config": hf.config.to_dict(), "attention": hf.config._attn_implementation, "hooks": hooks}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_hugging_face_model_is_left_as_it_was(builtin_tokenizer: Any, attention: str) -> None:
    hf = AutoModelForCausalLM.from_pretrained(builtin.folder(), attn_implementation=attention).eval()
    before = state(hf)
    task_set = load_task("pronoun", builtin_tokenizer, n_per_cell=1)
    assert accuracy(hf, task_set).total == 8
    assert state(hf) == before
    score_heads(hf, builtin_tokenizer, n_per_cell=1, n_repeats=2)
    assert state(hf) == before


def test_result_as_json(builtin_model: headtrace.Model) -> None:
    task_set = load_task("pronoun", builtin_model.tokenizer, n_per_cell=1)
    record: Any = accuracy(builtin_model, task_set).to_dict()
    assert record["total"] == 8
    assert set(record["by_label"]) == {"form", "gender"}
    assert record["wilson_95"][0] <= record["rate"] <= record["wilson_95"][1]


def test_empty_set_is_refused(builtin_model: headtrace.Model) -> None:
    with pytest.raises(InputError, match="empty"):
        accuracy(builtin_model, TaskSet("none", ()))
