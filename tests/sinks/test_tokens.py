"""Where attention goes: every head's masses are one in all, sinks are found by what they receive."""

from __future__ import annotations

import polars as pl
import pytest
import torch

from headtrace.sinks.tokens import (
    KINDS,
    SinkPrompt,
    SinkRule,
    incoming,
    kind_masses,
    kind_of,
    mass_table,
    sink_mass,
    sinks_in,
    token_table,
)
from tests.rounding import rounding
from tests.tiny import prompts, tiny_model


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_masses_on_all_kinds_of_tokens_sum_to_one(name: str) -> None:
    model = tiny_model(name)
    recording = model.record(prompts())
    for prompt, n in enumerate(recording.lengths):
        kinds = ["first", *(["punctuation", "word", "number"] * n)[: n - 1]]
        masses = kind_masses(recording, prompt, kinds)
        assert masses.shape == (model.n_layers, model.n_heads, len(KINDS))
        one = torch.ones(model.n_layers, model.n_heads)
        assert torch.allclose(masses.sum(-1), one, atol=rounding(torch.float32, n * n))
        first = recording.patterns[:, prompt, :, 1:n, 0].mean(-1)
        assert torch.allclose(masses[..., 0], first, atol=rounding(torch.float32, n * n))
        itself = torch.stack([recording.patterns[:, prompt, :, d, d] for d in range(1, n)]).mean(0)
        assert torch.allclose(masses[..., 1], itself, atol=rounding(torch.float32, n * n))


def test_mass_on_sinks_counts_sinks_before_the_destination_and_no_padding() -> None:
    model = tiny_model("llama")
    ids = prompts()
    recording = model.record(ids)
    sinks = torch.zeros(2, 11, dtype=torch.bool)
    sinks[:, [0, 4]] = True
    found = sink_mass(recording.patterns[1], sinks, recording.lengths)
    for prompt, n in enumerate(recording.lengths):
        pattern = recording.patterns[1, prompt, :, :n, :n]
        expected = [
            sum(float(pattern[h, d, s]) for d in range(1, n) for s in (0, 4) if s < d) / (n - 1)
            for h in range(model.n_heads)
        ]
        assert found[prompt].tolist() == pytest.approx(expected, abs=rounding(torch.float32, n * n))


def test_incoming_attention_is_the_mean_over_heads_and_later_tokens_that_see_a_token() -> None:
    model = tiny_model("mistral")  # with a sliding window of 5
    recording = model.record(prompts())
    n, source = 7, 1
    seen = [
        float(recording.patterns[layer, 1, :, d, source].mean())
        for layer in range(model.n_layers)
        for d in range(source + 1, n)
        if bool(recording.visible[layer][1, d, source])
    ]
    assert len(seen) < model.n_layers * (n - source - 1)
    found = float(incoming(recording, 1)[source])
    assert found == pytest.approx(sum(seen) / len(seen), abs=rounding(torch.float32, 100))


def test_a_token_that_takes_attention_wherever_it_stands_is_a_sink() -> None:
    model = tiny_model("gpt2")
    cases = [SinkPrompt("t", (9, 5, 8, 7, 6)), SinkPrompt("t", (3, 8, 5, 4, 2))]
    received = [torch.tensor([0.7, 0.5, 0.1, 0.9, 0.9]), torch.tensor([0.8, 0.1, 0.6, 0.9, 0.9])]
    model.tokenizer = _Letters()
    table = token_table(model, cases, received)
    assert table["token_id"].to_list()[:2] == [None, 5]
    assert 7 not in table["token_id"].to_list(), "too few tokens see it"
    rule = sinks_in(table, 0.3, 2)
    assert rule == SinkRule(frozenset({5}), 0.3)
    assert rule.positions(cases[0].ids) == [0, 1]
    assert rule.mask(cases, 6).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 2]]
    assert sinks_in(table, 0.6, 2).ids == frozenset()


class _Letters:
    """Enough of a tokenizer to name tokens."""

    all_special_ids = (1,)

    def convert_ids_to_tokens(self, ids):
        return [chr(97 + i) for i in ids]

    def decode(self, ids, **_):
        return "".join(chr(97 + i) for i in ([ids] if isinstance(ids, int) else ids))


def test_kinds_of_tokens() -> None:
    assert [kind_of(t) for t in (".", " (", "7", " x1", " ", "<|im_start|>", "é", "don't")] == [
        "punctuation",
        "punctuation",
        "number",
        "number",
        "space",
        "special",
        "word",
        "word",
    ]


def test_the_table_of_masses_has_intervals_over_prompts() -> None:
    by_kind = torch.rand(6, 2, 3, len(KINDS), generator=torch.Generator().manual_seed(0))
    table = mass_table(by_kind, by_kind[..., 0] * 2, seed=0)
    assert len(table) == 2 * 3 * (1 + len(KINDS))
    assert bool((table["low"] <= table["mass"]).all())
    assert bool((table["mass"] <= table["high"]).all())
    one = table.filter(layer=1, head=2, kind="sinks")["mass"][0]
    assert one == pytest.approx(float(by_kind[:, 1, 2, 0].mean()) * 2)
    assert table.schema["mass"] == pl.Float64
