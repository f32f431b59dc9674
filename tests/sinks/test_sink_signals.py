"""SinkSignals of firings on sinks are those of the causal definition; constancy and sharing are what they must be."""

from __future__ import annotations

import polars as pl
import pytest
import torch

import headtrace
from headtrace.causal.signals import Reader, channel_mask
from headtrace.sinks.sink_signals import (
    SignalVectors,
    SinkFiring,
    SinkSignals,
    choose_firings,
    constancy_table,
    direction_table,
    group_table,
    mean_of_pairs,
    mean_signals,
    one_firing_per_head,
)
from headtrace.sinks.tokens import SinkPrompt
from headtrace.vocabulary import ATTENTION_SIDES, Firing
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model


def sink_firings(model, recording, prompt: int = 0, seed: int = 0) -> list[Firing]:
    sinks = torch.zeros(recording.token_ids.shape[1], dtype=torch.bool)
    sinks[0] = True
    tracer = headtrace.Tracer(model, tau=0.2)
    return list(one_firing_per_head(tracer, recording, prompt, sinks, (seed,)))


@pytest.mark.parametrize("name", NAMES)
def test_summed_signals_are_the_sums_of_the_causal_definition(name: str) -> None:
    """Many firings at once give what one firing after the other gives with `headtrace.causal.signals`."""
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts())
    tracer, vectors = headtrace.Tracer(model, tau=0.2), SignalVectors(model)
    asked = [(p, f) for p in (0, 1) for f in sink_firings(model, recording, p)]
    assert len(asked) > 2
    causes = tracer.trace_firings(recording, [f for _, f in asked], [p for p, _ in asked])
    for side in ATTENTION_SIDES:
        found = vectors.summed(recording, causes, side)
        for row, each in enumerate(causes):
            reader, at = Reader(recording[each.prompt], each.firing, side), each.firing
            expected = torch.zeros(model.d_model, dtype=model.dtype)
            for cause in each.side(side).causes:
                if cause.component.kind == "offset" or not cause.site.possible:
                    continue
                coefficients = reader.coefficients(cause.component)
                kept = coefficients * channel_mask(cause.channels, coefficients.shape[-1], coefficients)
                expected += reader.in_residual(kept)[at.dest if side == "query" else at.src]
            size = float(expected.abs().max())
            # Both go through inverses of the head's matrices, which make rounding larger by their condition.
            condition = float(torch.linalg.cond(reader.W)) * float(torch.linalg.cond(reader.bases[0]))
            allowed = rounding(torch.float64, forward_terms(model), max(size, 1.0)) * condition
            assert float((found[row] - expected).abs().max()) <= allowed
    assert float(vectors.summed(recording, causes, "query").norm(dim=-1).max()) > 0


def test_a_firing_on_a_sink_is_above_the_threshold_and_drawn_alike_for_equal_prompts() -> None:
    model = tiny_model("gpt2")
    ids = prompts()[0]
    recording = model.record([ids, ids, prompts(1)[0]])
    first, second = sink_firings(model, recording, 0), sink_firings(model, recording, 1)
    assert first == second
    assert first
    for f in first:
        assert f.layer > 0
        assert f.src == 0 < f.dest
        assert float(recording.patterns[f.layer, 0, f.head, f.dest, 0]) >= 0.2
    heads = [(f.layer, f.head) for f in first]
    assert len(set(heads)) == len(heads)
    drawn = {tuple(sink_firings(model, recording, 0, seed)) for seed in range(5)}
    assert len(drawn) > 1, "another seed draws other destinations"


def test_firings_are_chosen_from_all_tasks_alike() -> None:
    cases = [SinkPrompt(task, (1, 2, 3)) for task in ("a", "b") for _ in range(10)]
    found = [SinkFiring(p, Firing(1, h, 2, 0), 0.9) for p in range(20) for h in range(2)]
    chosen = choose_firings(found, cases, 6, seed=0)
    assert len(chosen) == 12
    for head in range(2):
        mine = [cases[each.prompt].task for each in chosen if each.firing.head == head]
        assert mine.count("a") == mine.count("b") == 3
    assert choose_firings(found, cases, 6, seed=0) == chosen


def made_up(vectors: dict[tuple[int, int], list[tuple[str, list[float]]]]) -> SinkSignals:
    rows = [
        {"layer": layer, "head": head, "prompt": prompt, "task": task}
        for (layer, head), each in vectors.items()
        for prompt, (task, _) in enumerate(each)
    ]
    stacked = torch.tensor([v for each in vectors.values() for _, v in each])
    return SinkSignals(pl.DataFrame(rows), {"query": stacked, "key": stacked})


def test_constancy_takes_pairs_of_different_tasks() -> None:
    """Equal within a task, at right angles between tasks: constant within, not over tasks."""
    signals = made_up({(1, 0): [("a", [1.0, 0]), ("a", [2.0, 0]), ("b", [0, 1.0]), ("b", [0, 3.0])]})
    row = constancy_table(signals, seed=0).row(0, named=True)
    assert row["constancy"] == pytest.approx(0)
    assert row["within"] == pytest.approx(1)
    one_task = made_up({(1, 0): [("a", [1.0, 0]), ("a", [1.0, 0]), ("a", [0, 1.0])]})
    assert constancy_table(one_task, seed=0)["constancy"][0] == pytest.approx(1 / 3)


def test_a_prompt_is_no_pair_with_itself_when_prompts_are_drawn_again() -> None:
    cosines = torch.eye(6).numpy()
    pairs = ~torch.eye(6, dtype=torch.bool).numpy()
    assert mean_of_pairs(cosines, pairs, 0) == (0, 0, 0)
    assert mean_of_pairs(cosines, pairs & False, 0) == (None, None, None)


def test_zero_signals_and_single_ones_have_no_constancy() -> None:
    signals = made_up({(1, 0): [("a", [1.0, 0]), ("b", [0.0, 0])], (1, 1): [("a", [0.0, 0.0])]})
    table = constancy_table(signals, seed=0).filter(side="query")
    assert table["constancy"].to_list() == [None, None]
    assert table["firings"].to_list() == [1, 0]
    assert mean_signals(signals, "query").names == ["L1H0"]


def test_heads_that_share_a_direction_are_counted_and_grouped() -> None:
    signals = made_up(
        {
            (1, 0): [("a", [1.0, 0.02, 0])],
            (2, 0): [("a", [-5.0, 0.0, 0])],
            (3, 1): [("a", [1.0, 0.0, 0.03])],
            (3, 2): [("a", [0.0, 0.0, 2.0])],
        }
    )
    means = {side: mean_signals(signals, side) for side in ATTENTION_SIDES}
    table = direction_table(means).filter(side="query")
    assert table["shared"].to_list()[:2] == [3, 1]
    assert table["explained"][0] == pytest.approx(0.75, abs=0.01)
    assert table["cumulative"].to_list()[-1] == pytest.approx(1)
    groups = group_table(means).filter(side="key")
    assert groups["size"].to_list() == [3, 1]
    assert sorted(groups["heads"][0]) == ["L1H0", "L2H0", "L3H1"]
    assert groups["layers"][0] == 3
    directions = means["query"].directions
    identity = torch.eye(len(directions))
    assert torch.allclose(directions @ directions.T, identity, atol=rounding(torch.float32, 3))
