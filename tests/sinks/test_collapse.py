"""Removing directions inside the running model: nothing of them is read, nothing else changes, controls are fair."""

from __future__ import annotations

import pytest
import torch

from headtrace.causal.changes import DirectionRemoval
from headtrace.models import Observer
from headtrace.sinks.collapse import (
    MEASURES,
    NOTHING,
    MeasuredRemoval,
    RemovalCondition,
    RemovalExperiment,
    collapse_table,
)
from headtrace.sinks.sink_signals import MeanSignals
from headtrace.sinks.tokens import SinkPrompt, SinkRule
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model

F64 = torch.float64


def orthonormal(n: int, d: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(d, n, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q.T


def inputs(name: str):
    model = tiny_model(name, dtype=F64)
    ids = torch.tensor(prompts()[:1])
    sinks = torch.zeros(ids.shape, dtype=torch.bool)
    sinks[:, [0, 3]] = True
    return model, ids, sinks


def removals(directions: torch.Tensor, layer: int, sinks: torch.Tensor) -> list[DirectionRemoval]:
    """Directions removed from queries past the first token and from keys of sinks, in one prompt."""
    past_first = torch.arange(sinks.shape[1]) > 0
    return [
        DirectionRemoval("query", directions, layer, past_first),
        DirectionRemoval("key", directions, layer, sinks[0]),
    ]


class Reading(Observer):
    """The residual, queries and keys of one layer."""

    layer = 2

    def layer_input(self, layer, residual, rotary) -> None:
        if layer == self.layer:
            self.residual = residual

    def see(self, call, pattern) -> None:
        if call.layer == self.layer:
            self.query, self.key, self.pattern = call.query, call.key, pattern


@pytest.mark.parametrize("name", NAMES)
def test_what_heads_read_has_nothing_of_a_removed_direction_left(name: str) -> None:
    """Queries past the first token, and keys of sinks, are those of a residual without the directions."""
    model, ids, sinks = inputs(name)
    directions = orthonormal(3, model.d_model)
    seen: list[torch.Tensor] = []

    class Watched(MeasuredRemoval):
        def query_input(self, layer, residual):
            return self._kept(layer, super().query_input(layer, residual))

        def key_input(self, layer, residual):
            return self._kept(layer, super().key_input(layer, residual))

        def _kept(self, layer, changed):
            if changed is not None and layer == Reading.layer:
                seen.append(changed)
            return changed

    watched = Watched(model, [removals(directions, Reading.layer, sinks)], ids.shape[1])
    reading, clean = Reading(), Reading()
    model.run(ids, watched, reading)
    model.run(ids, clean)
    query, key = seen
    allowed = rounding(F64, model.d_model, float(clean.residual.abs().max()))
    assert float((query[0, 1:] @ directions.T).abs().max()) <= allowed
    assert float((key[0, [0, 3]] @ directions.T).abs().max()) <= allowed
    others = [t for t in range(ids.shape[1]) if t not in (0, 3)]
    assert torch.equal(key[0, others], reading.residual[0, others]), "other keys read what there is"
    assert torch.equal(query[0, 0], reading.residual[0, 0])
    # The layer is the first one that is touched: its own residual is the model's, its pattern is not.
    size = rounding(F64, forward_terms(model), float(clean.residual.abs().max()))
    assert float((reading.residual - clean.residual).abs().max()) <= size
    assert float((reading.pattern - clean.pattern).abs().max()) > 1e-6


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2"])
def test_a_direction_that_is_not_there_changes_nothing(name: str) -> None:
    """Directions at right angles to every residual that is read leave all attention as it was."""
    model, ids, sinks = inputs(name)
    clean = model.record(ids.tolist())
    residuals = clean.residuals[:-1, 0].flatten(0, 1)
    _, size, right = torch.linalg.svd(residuals, full_matrices=True)
    rank = int((size > 1e-9 * size[0]).sum())
    if rank >= model.d_model:  # all of the space is used: take the residuals of one layer only
        residuals = clean.residuals[3, 0]
        _, size, right = torch.linalg.svd(residuals, full_matrices=True)
        rank = len(size)
    removing = MeasuredRemoval(model, [removals(right[rank : rank + 2], 3, sinks)], ids.shape[1])
    reading = Reading()
    reading.layer = 3
    model.run(ids, removing, reading)
    allowed = rounding(F64, forward_terms(model), 10.0)
    assert float((reading.pattern - clean.patterns[3]).abs().max()) <= allowed
    assert float(removing.share().max()) <= allowed


def test_random_directions_take_away_as_much_of_every_token() -> None:
    x = torch.randn(2, 5, 16, dtype=F64, generator=torch.Generator().manual_seed(3))
    own, other = orthonormal(2, 16), torch.stack([orthonormal(2, 16, seed) for seed in (1, 2)])
    every = torch.ones(2, 5, dtype=torch.bool)
    signals = DirectionRemoval("query", own, 1, every).part(x)
    control = DirectionRemoval("query", own, 1, every, other).part(x)
    allowed = rounding(F64, 16, float(x.abs().max()))
    assert float((signals.norm(dim=-1) - control.norm(dim=-1)).abs().max()) <= allowed
    outside = control - (control @ other.mT) @ other
    assert float(outside.abs().max()) <= allowed, "what is removed lies along the random directions"
    assert float((signals - control).abs().max()) > 0.1


def experiment(name: str = "llama", n: int = 3) -> RemovalExperiment:
    model = tiny_model(name)
    ids = prompts(0, (11, 7, 9))[:n]
    cases = [SinkPrompt("t", tuple(each), (5,), (7,)) for each in ids]
    directions = orthonormal(4, model.d_model).float()
    mean = MeanSignals(((1, 0), (2, 1)), directions[:2], directions, (0.4, 0.3, 0.2, 0.1))
    return RemovalExperiment(model, cases, SinkRule(frozenset(), 0.3), {"query": mean, "key": mean}, seed=0)


def test_nothing_removed_is_the_model_itself_and_prompts_do_not_disturb_each_other() -> None:
    study = experiment()
    together = study.measured(
        [NOTHING, RemovalCondition("both", 2, "signals"), RemovalCondition("key", 2, "random")]
    )
    model = study.model
    for place, case in enumerate(study.cases):
        recording = model.record(list(case.ids))
        n = case.length
        mass = float(recording.patterns[:, 0, :, 1:, 0].mean())
        logits = recording.logits[0]
        loss = float(torch.nn.functional.cross_entropy(logits[: n - 1], torch.tensor(case.ids[1:])))
        difference = float(logits[-1, 5] - logits[-1, 7])
        allowed = rounding(torch.float32, forward_terms(model), float(logits.abs().max()))
        expected = [mass, loss, difference, float(difference > 0), 0.0]
        assert together[0, place].tolist() == pytest.approx(expected, abs=allowed)
    alone = RemovalExperiment(model, study.cases[:1], study.rule, study.means, 0)
    mine = alone.measured(
        [NOTHING, RemovalCondition("both", 2, "signals"), RemovalCondition("key", 2, "random")]
    )
    assert mine[:, 0].flatten().tolist() == pytest.approx(together[:, 0].flatten().tolist(), abs=1e-3)


def test_conditions_remove_no_more_directions_than_there_are() -> None:
    found = experiment().conditions((1, 2, 16))
    assert found[0] == NOTHING
    assert {c.directions for c in found[1:]} == {1, 2, 4}
    assert {(c.side, c.removed) for c in found[1:]} == {
        (side, removed) for side in ("query", "key", "both") for removed in ("signals", "random")
    }
    assert experiment().conditions(()) == [NOTHING]


def test_the_table_has_intervals_differences_and_tasks_and_leaves_out_what_has_no_answer() -> None:
    conditions = [NOTHING, RemovalCondition("key", 1, "signals"), RemovalCondition("key", 1, "random")]
    values = torch.zeros(3, 4, len(MEASURES), dtype=F64)
    values[1, :, 0], values[2, :, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64), 0.5
    values[:, 2:, 2] = torch.nan
    table = collapse_table(conditions, values, ["a", "a", "b", "b"], seed=0)
    row = table.filter(task="all", removed="signals", measure="sink mass").row(0, named=True)
    assert row["mean"] == pytest.approx(0.25)
    assert row["low"] < 0.25 < row["high"]
    difference = table.filter(task="b", removed="signals - random", measure="sink mass")["mean"][0]
    assert difference == pytest.approx(-0.15)
    assert table.filter(task="all", removed="nothing", measure="logit difference")["prompts"][0] == 2
    assert not len(table.filter(task="b", measure="logit difference"))
