"""Figures of sufficiency: what they show can be read off them alone."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from headtrace.causal import sufficiency
from headtrace.figures.causal import HIGHEST, LOWEST, sufficiency_by_method, sufficiency_curves
from tests.causal.traced import traced
from tests.figures.untouched import matplotlib_untouched
from tests.tiny import prompts


def test_a_figure_of_one_circuit_names_every_ranking_and_both_ends(tmp_path) -> None:
    model, circuit = traced("llama")
    found = sufficiency(circuit, model, prompts(9)[0], baselines=["random", "attention"])
    with matplotlib_untouched():
        figure = sufficiency_curves(found, tmp_path / "one.png")
    axis = figure.axes[0]
    shown = [text.get_text() for text in axis.get_legend().get_texts()]
    assert [name.split(":")[0].split(" (")[0] for name in shown] == ["random", "attention", "this circuit"]
    assert f"{found.clean:.2f} (1)" in figure.get_suptitle()
    assert f"{found.counterfactual:.2f} (0)" in figure.get_suptitle()
    low, high = axis.get_ylim()
    assert low >= LOWEST
    assert high <= HIGHEST
    assert axis.get_xscale() == "log"
    zero = sufficiency_curves(replace(found, ablation="zero", compared={}))
    assert "replaced by zero" in zero.axes[0].get_xlabel()


def test_a_figure_of_many_prompts_has_a_panel_per_task_and_a_line_per_method(tmp_path) -> None:
    rows = [
        {"task": task, "prompt": f"{task}/{i}", "method": method, "components": n, "sufficiency": 0.1 * n + i}
        for task in ("ioi", "facts")
        for i in range(3)
        for method in ("acc++", "random")
        for n in (1, 2, 5)
    ]
    figure = sufficiency_by_method(pl.DataFrame(rows), tmp_path / "many.png")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["ioi (3 prompts)", "facts (3 prompts)"]
    medians = figure.axes[0].lines[0].get_ydata()
    assert [round(float(y), 3) for y in medians] == [1.1, 1.2, 1.5]
