"""What heads do, by where they look: simple attention scores.

    scores = score_heads(model)
    for head in scores.top("induction", 3):
        print(head)                        # L2H1  0.93

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
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.tasks.draws import Draw
from headtrace.tasks.registry import load_task
from headtrace.tasks.tokens import is_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headtrace.tasks.examples import Example

KINDS = ("previous", "duplicate", "induction", "subject", "name_moving")


@dataclass(frozen=True)
class HeadScore:
    """One head's score."""

    layer: int
    head: int
    score: float

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} {self.score:.2f}"


@dataclass(frozen=True)
class HeadScores:
    """Scores of all heads, by kind."""

    scores: dict[str, Float[Tensor, "layers heads"]]

    def top(self, kind: str, k: int = 5) -> list[HeadScore]:
        """The ``k`` heads that do this most."""
        if kind not in self.scores:
            raise InputError(f"There is no head score {kind!r}. Use one of: {', '.join(self.scores)}.")
        table = self.scores[kind]
        values, flat = table.flatten().topk(min(k, table.numel()))
        heads = table.shape[1]
        return [
            HeadScore(int(index) // heads, int(index) % heads, float(value))
            for value, index in zip(values, flat, strict=True)
        ]


def score_heads(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    n_per_cell: int = 2,
    n_repeats: int = 32,
    repeat_length: int = 10,
    seed: int = 0,
) -> HeadScores:
    """Score every head of a ``headtrace.Model``, or of a Hugging Face causal LM and its tokenizer."""
    hf: PreTrainedModel = getattr(model, "hf", model)
    reader: PreTrainedTokenizerBase = model.tokenizer if tokenizer is None else tokenizer
    examples = load_task("ioi", reader, n_per_cell=n_per_cell, seed=seed).examples
    repeats = _repeated(reader, n_repeats, repeat_length, seed)
    # Only the eager implementation hands out its attention weights.
    before: Any = hf.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    hf.set_attn_implementation("eager")
    try:
        return HeadScores({**_on_repeats(hf, repeats), **_on_ioi(hf, examples)})
    finally:
        hf.set_attn_implementation(before)


def _on_repeats(hf: PreTrainedModel, repeats: list[list[int]]) -> dict[str, Float[Tensor, "layers heads"]]:
    length = len(repeats[0]) // 2
    prefix = len(repeats[0]) % 2
    attention = _attention(hf, repeats)
    second = torch.arange(prefix + length, prefix + 2 * length)
    return {
        "duplicate": attention[:, :, :, second, second - length].mean((1, 3)),
        "induction": attention[:, :, :, second[:-1], second[:-1] - length + 1].mean((1, 3)),
    }


def _on_ioi(hf: PreTrainedModel, examples: Sequence[Example]) -> dict[str, Float[Tensor, "layers heads"]]:
    previous: list[Tensor] = []
    subject: list[Tensor] = []
    moving: list[Tensor] = []
    # Prompts of one length go together, so that nothing is padded.
    by_length: dict[int, list[Example]] = {}
    for example in examples:
        by_length.setdefault(len(example.token_ids), []).append(example)
    for group in by_length.values():
        attention = _attention(hf, [list(example.token_ids) for example in group])
        for row, example in enumerate(group):
            to = attention[:, row, :, example.roles["end"]]
            previous.append(attention[:, row].diagonal(-1, -2, -1).mean(-1))
            subject.append(to[..., example.roles["S2"]])
            moving.append(to[..., example.roles["IO"]])
    return {
        "previous": torch.stack(previous).mean(0),
        "subject": torch.stack(subject).mean(0),
        "name_moving": torch.stack(moving).mean(0),
    }


def _attention(hf: PreTrainedModel, ids: list[list[int]]) -> Float[Tensor, "layers batch heads to from"]:
    with torch.no_grad():
        output: Any = hf(
            input_ids=torch.tensor(ids, device=hf.device), output_attentions=True, use_cache=False
        )
    return torch.stack([layer.float().cpu() for layer in output.attentions])


def _repeated(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int) -> list[list[int]]:
    """Random ordinary tokens, said twice; behind a beginning-of-text token if the tokenizer uses one."""
    special = set(tokenizer.all_special_ids)
    ordinary = [
        token for token in range(len(tokenizer)) if token not in special and not is_unknown(tokenizer, token)
    ]
    # What the tokenizer itself puts before a text.
    empty: Any = tokenizer("")["input_ids"]
    prefix = [token for token in empty if token == tokenizer.bos_token_id][:1]
    draw = Draw("repeats", seed)
    halves = [draw.sample(ordinary, length) for _ in range(count)]
    return [prefix + half + half for half in halves]
