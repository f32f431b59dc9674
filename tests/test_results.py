"""Every result: rows as a frame, a repr that says what it is, a notebook view, and a figure where it has one."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.figure import Figure

import headtrace
from headtrace.causal import intervene
from headtrace.causal.bench import bench
from headtrace.causal.expectations import expect, make_claims
from headtrace.causal.experiments import edge_pairs, edges_into_head, residual_changes, single_edges
from headtrace.causal.faithfulness import faithfulness
from headtrace.channels.terms import decompose_all
from headtrace.families import compare_circuits, compare_runs, shared_steps
from headtrace.interpret import interpret_examples
from headtrace.interpret.atlas import atlas
from headtrace.runs.references import agreement, load_reference
from headtrace.tasks import accuracy, load_task
from headtrace.tasks.head_scores import score_heads
from tests.conftest import IOI
from tests.interpret.made_up_signals import previous, same_token, signal_by

FLIPPED = IOI.replace("John gave", "Mary gave")
OTHER = "When Anna and Tom went to the store, Emma gave a drink to"


@cache
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@cache
def tracer() -> headtrace.Tracer:
    return headtrace.Tracer(model())


@cache
def circuit(paths: str = "attention") -> headtrace.Circuit:
    how = {"counterfactual": FLIPPED} if paths == "difference" else {}
    return tracer().trace(IOI, " Mary", " John", paths=paths, **how)


@cache
def explained() -> Any:
    return tracer().explain(IOI, "L2H0:14:10", rather_than="Mary")


@cache
def families() -> Any:
    task = load_task("ioi", model().tokenizer, n=12)
    labels = [each.labels for each in task]
    return headtrace.find_families(tracer().trace_batch(list(task)), "components", n=2, labels=labels)


def _run(folder: Path) -> headtrace.Run:
    return headtrace.run(model(), [IOI, OTHER, "When Tom and Anna went to"], out=folder / "run", top_k=1)


def _bench(folder: Path) -> Any:
    line = {"text": IOI, "answer": " Mary", "wrong": " John", "counterfactual": OTHER}
    (folder / "ioi.jsonl").write_text(json.dumps(line))
    return bench(model(), folder / "ioi.jsonl", methods=["random"], n=1)


def _agreement(folder: Path) -> Any:
    about = {"name": "builtin", "n_layers": 3, "n_heads": 4}
    content = {"schema": "headtrace.reference/1", "name": "movers", "model": about}
    content["heads"] = [{"layer": 1, "head": 2}]
    (folder / "reference.json").write_text(json.dumps(content))
    return agreement(headtrace.merge([circuit()]), load_reference(folder / "reference.json"))


MADE: dict[str, Callable[[Path], Any]] = {
    "Recording": lambda _: model().record(IOI),
    "ModelChannels": lambda _: model().channels,
    "FiringTerms": lambda _: decompose_all(model().record(IOI), above=0.5),
    "Decomposition": lambda _: model().decompose(model().record(IOI), "L1H2:14:2"),
    "Explanation": lambda _: explained(),
    "RatherThan": lambda _: explained().rather_than,
    "Pairs": lambda _: explained().pairs(5),
    "Circuit": lambda _: circuit(),
    "Report": lambda _: headtrace.verify(circuit(), model(), edges="top:2"),
    "PatchTest": lambda _: headtrace.verify(circuit("difference"), model(), edges="top:2").patches,
    "Intervened": lambda _: intervene(circuit(), model(), circuit().top(1)[0]),
    "SingleEdges": lambda _: single_edges(circuit(), model(), edges="top:3", controls=2),
    "EdgesIntoHead": lambda _: edges_into_head(circuit(), model(), "L2H0"),
    "ResidualChanges": lambda _: residual_changes(circuit(), model()),
    "Additivity": lambda _: edge_pairs(circuit(), model(), pairs=2),
    "Sufficiency": lambda _: headtrace.sufficiency(circuit(), model(), OTHER, draws=1),
    "Faithfulness": lambda _: faithfulness(circuit(), model(), controls=1),
    "Importance": lambda _: headtrace.importance(model(), IOI, " Mary", " John", budget=12),
    "Expectations": lambda _: expect(make_claims(circuit(), model()), model()),
    "Bench": _bench,
    "Mechanism": lambda _: circuit("difference").mechanism(),
    "Run": _run,
    "Network": lambda _: headtrace.merge([circuit()]),
    "ReferenceAgreement": _agreement,
    "Families": lambda _: families(),
    "Choice": lambda _: headtrace.find_families(families().population, "components").choice,
    "Stability": lambda _: families().stability(resamples=4),
    "ExclusiveAblation": lambda _: families().ablate_exclusive(model(), prompts=1),
    "CircuitComparison": lambda _: compare_circuits([circuit(), circuit("complete")]),
    "SignalComparison": lambda _: headtrace.compare_signals(circuit(), circuit(), model()),
    "SharedSteps": lambda folder: shared_steps(
        headtrace.run(
            model(),
            [{"text": IOI, "answer": " Mary", "wrong": " John", "counterfactual": OTHER}],
            out=folder / "steps",
            mechanisms=True,
        )
    ),
    "RunComparison": lambda folder: compare_runs(_run(folder), folder / "run"),
    "Sinks": lambda _: headtrace.find_sinks(model(), [IOI, OTHER], directions=()),
    "Interpretation": lambda _: interpret_examples(
        [signal_by(rule, seed=i) for i, rule in enumerate((same_token, previous))]
    ),
    "Atlas": lambda folder: atlas(model(), "sampled:64", out=folder / "atlas", length=8),
    "Accuracy": lambda _: accuracy(model(), load_task("ioi", model().tokenizer, n=12)),
    "HeadScores": lambda _: score_heads(model(), n_per_cell=1, n_repeats=2),
}
PARTS = {"Edges", "Emergence", "WithTable"}
"""Not results themselves: some edges of a circuit, a base class. ``Emergence.frame`` is a field."""


@pytest.mark.parametrize("name", MADE)
def test_a_result_has_rows_a_name_a_view_and_its_figure(name: str, tmp_path: Path) -> None:
    found = MADE[name](tmp_path)
    assert type(found).__name__ == name
    rows = found.frame()
    assert isinstance(rows, pl.DataFrame)
    assert rows.height > 0
    text = repr(found)
    assert text.startswith(f"{name}(")
    assert "\n" not in text
    assert len(text) < 250
    assert "<" in found._repr_html_()
    if hasattr(found, "plot"):
        assert isinstance(found.plot(), Figure)
    if "of" in inspect.signature(found.frame).parameters:
        with pytest.raises(headtrace.errors.InputError):
            found.frame("nothing of the kind")


def test_every_class_that_shows_itself_is_among_them() -> None:
    """Whoever adds a result with a frame, a figure or a notebook view adds it above, and the rest with it."""
    shown: set[str] = set()
    for each in pkgutil.walk_packages(headtrace.__path__, "headtrace."):
        if each.name.startswith(("headtrace.toy", "headtrace.cli", "headtrace.__main__")):
            continue
        for name, kind in inspect.getmembers(importlib.import_module(each.name), inspect.isclass):
            here = kind.__module__ == each.name and not name.startswith("_")
            if here and any(hasattr(kind, method) for method in ("_repr_html_", "plot", "frame")):
                shown.add(name)
    assert shown - PARTS == set(MADE)
