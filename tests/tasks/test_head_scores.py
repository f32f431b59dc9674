"""Head scores are means of attention weights, on the right token pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headtrace
from headtrace.errors import InputError
from headtrace.tasks import load_task, score_heads
from headtrace.tasks.head_scores import SCORES


def uniform_model(vocabulary: int) -> Any:
    """Without queries and keys every visible token gets the same attention."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": vocabulary}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.attn.c_attn.weight)
    return model


def test_scores_of_uniform_attention_are_known(builtin_tokenizer: Any) -> None:
    model = uniform_model(len(builtin_tokenizer)).double()
    scores = score_heads(model, builtin_tokenizer, n_per_cell=1, repeat_length=6).scores
    examples = load_task("ioi", builtin_tokenizer, n_per_cell=1).examples
    lengths = [len(example.token_ids) for example in examples]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    # On repeats the second half of six words begins at position 7, behind the beginning-of-text token.
    expected = {
        "previous": mean([mean([1 / (p + 1) for p in range(1, length)]) for length in lengths]),
        "duplicate": mean([1 / (p + 1) for p in range(7, 13)]),
        "induction": mean([1 / (p + 1) for p in range(7, 12)]),
        "subject": mean([1 / length for length in lengths]),
        "name_moving": mean([1 / length for length in lengths]),
    }
    assert set(scores) == set(SCORES) == set(expected)
    # Means of at most 32 x 6 weights below 1 in float64: 192 roundings of 2^-53 each, and a few for each weight.
    for name, value in expected.items():
        torch.testing.assert_close(
            scores[name], torch.full((2, 2), value, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_a_token_in_front_is_put_in_front_of_repeats_too(gpt2_tokenizer: Any, builtin_tokenizer: Any) -> None:
    """Uniform attention tells at which positions it was read."""
    for tokenizer, front in ((gpt2_tokenizer, 0), (builtin_tokenizer, 1)):
        model = headtrace.load(uniform_model(len(tokenizer)).double(), tokenizer=tokenizer)
        duplicate = score_heads(model, n_per_cell=1, n_repeats=3, repeat_length=4).scores["duplicate"]
        expected = sum(1 / (front + p + 1) for p in range(4, 8)) / 4
        torch.testing.assert_close(
            duplicate, torch.full((2, 2), expected, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_top_is_sorted_and_named(builtin_model: headtrace.Model) -> None:
    scores = score_heads(builtin_model, n_per_cell=1)
    best = scores.top("induction", 4)
    table = scores.scores["induction"]
    assert [each.score for each in best] == sorted(table.flatten().tolist(), reverse=True)[:4]
    assert table[best[0].layer, best[0].head] == best[0].score
    assert str(best[0]).startswith(f"L{best[0].layer}H{best[0].head} ")


def test_unknown_score_is_an_error(builtin_model: headtrace.Model) -> None:
    scores = score_heads(builtin_model, n_per_cell=1, n_repeats=2)
    with pytest.raises(InputError, match=r"no head score 'mind-reading'.*induction"):
        scores.top("mind-reading")
