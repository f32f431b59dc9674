"""One style for all figures, and none of it left behind in the user's matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
import pytest
from docs.studies.study_figures import faithfulness_panels

from headtrace.errors import InputError
from headtrace.figures import causal
from headtrace.figures.style import figure_kind, house_style, new_figure, save
from tests.figures.labels import missing_labels
from tests.figures.untouched import matplotlib_untouched

IMPORT_ALL = """
import importlib, pkgutil, sys
import matplotlib as mpl
from tests.figures.untouched import settings

before = settings()
import headtrace.figures
names = [m.name for m in pkgutil.iter_modules(headtrace.figures.__path__, "headtrace.figures.")]
for name in names:
    importlib.import_module(name)
assert settings() == before, "an import changed settings"
assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps every figure and chooses a backend"
print(len(names))
"""


def test_importing_the_figures_changes_no_setting_and_chooses_no_backend() -> None:
    made = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) == len(list(Path(causal.__file__).parent.glob("*.py"))) - 1


@pytest.mark.parametrize("end", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(end: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with house_style():
            figure, [[axis]] = new_figure(3.0, 2.0)
            axis.plot([1, 2], [3, 4], label="$5 and $6")
            axis.legend()
            save(figure, tmp_path / f"{name}.{end}")
    assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


def _single_edges() -> SimpleNamespace:
    numbers = np.random.default_rng(0).normal(size=(2, 2, 2, 5))
    rows = [
        {"reach": reach, "action": action, "measure": measure, "change": float(x), "randoms": [float(x) / 5]}
        for i, reach in enumerate(("local", "global"))
        for j, action in enumerate(("ablate", "boost"))
        for k, measure in enumerate(("attention", "metric"))
        for x in numbers[i, j, k]
    ]
    return SimpleNamespace(table=pl.DataFrame(rows), metric="logit difference")


def _edges_into_head() -> SimpleNamespace:
    rows = [
        {"reach": reach, "rank": rank, "attention": -0.1 * rank, "metric": -0.2 * rank}
        for reach in ("local", "global")
        for rank in range(4)
    ]
    return SimpleNamespace(table=pl.DataFrame(rows), metric="logit difference", head="L9H6")


def _additivity() -> SimpleNamespace:
    rows = [
        {"arrangement": arrangement, "reach": reach, "sum": x, "joint": 0.9 * x}
        for arrangement in ("serial", "parallel")
        for reach in ("local", "global")
        for x in (-1.0, -0.5, 0.1)
    ]
    return SimpleNamespace(table=pl.DataFrame(rows), metric="logit difference")


def _residual_changes() -> SimpleNamespace:
    rows = [
        {"what": what, "action": action, "cosine": 1 - x, "norm_ratio": 1 + x}
        for what in ("edge", "side")
        for action in ("ablate", "boost")
        for x in (0.01, 0.1, 0.2)
    ]
    return SimpleNamespace(table=pl.DataFrame(rows))


def _curve() -> SimpleNamespace:
    curve = pl.DataFrame({"firings": [0, 1, 2], "faithfulness": [0.0, 0.7, 1.0], "random": [0.0, 0.1, 0.2]})
    return SimpleNamespace(ablation="zero", unit="firing", mlps="keep", curve=curve)


def _report() -> SimpleNamespace:
    effect = {f"{a}_{n}": v for a, v in (("ablate", -0.2), ("boost", 0.1)) for n in ("attention", "metric")}
    controls = {f"control_{name}": (0.01, -0.02) for name in effect}
    effects = [SimpleNamespace(**effect, **controls) for _ in range(5)]
    return SimpleNamespace(effects=effects, metric="logit difference", reach="local", scope="side")


CAUSAL: dict[str, tuple[Any, ...]] = {
    "edge_effects": ([_report()],),
    "single_edge_violins": (_single_edges(),),
    "edges_into_head_bars": (_edges_into_head(),),
    "additivity_scatter": (_additivity(),),
    "residual_distributions": (_residual_changes(),),
    "faithfulness_curves": ([_curve()],),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_figures_are_drawn_from_tables_and_leave_matplotlib_alone(name: str, tmp_path: Path) -> None:
    with matplotlib_untouched():
        getattr(causal, name)(*CAUSAL[name], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_many_circuits_are_drawn_for_the_study() -> None:
    table = _curve().curve.with_columns(way=pl.lit("zero"), circuit=pl.lit(0))
    with matplotlib_untouched():
        assert missing_labels(faithfulness_panels(table, "logit difference")) == []


@pytest.mark.parametrize("name", CAUSAL)
def test_every_panel_of_a_causal_figure_says_what_its_axes_are(name: str) -> None:
    assert missing_labels(getattr(causal, name)(*CAUSAL[name])) == []


@pytest.mark.parametrize("name", ["edge_effects", "single_edge_violins"])
def test_violins_say_what_width_dots_and_diamond_mean_and_where_the_axis_is_linear(name: str) -> None:
    figure = getattr(causal, name)(*CAUSAL[name])
    assert figure.get_supxlabel() == causal.VIOLINS
    for part in ("dot", "width", "diamond", "mean", "linear", "logarithmic"):
        assert part in causal.VIOLINS
    for axis in figure.axes:
        assert axis.get_yscale() == "symlog"
        linear = axis.yaxis.get_transform().linthresh
        shaded = axis.patches[0].get_bbox()
        assert (shaded.ymin, shaded.ymax) == (-linear, linear), "what is shaded is what is linear"
    units = {axis.get_ylabel() for axis in figure.axes if axis.get_ylabel()}
    assert units == {"change of attention (share of attention)", "change of logit difference (logits)"}


@pytest.mark.parametrize(
    ("linear", "reach", "above"),
    [(0.03, 0.76, [0.05, 0.1, 0.2, 0.5]), (0.008, 1.4, [0.01, 0.1, 1.0]), (0.1, 0.1, [0.1])],
)
def test_a_logarithmic_axis_has_steps_that_show_it_is_one(
    linear: float, reach: float, above: list[float]
) -> None:
    """With -0.1, 0 and 0.1 alone, a mean of -0.27 looks like -0.13."""
    _, ((axis,),) = new_figure(4, 3)
    causal.violins(axis, [("a", [linear, reach], "#000000")], (linear, reach))
    ticks = axis.get_yticks()
    assert ticks.tolist() == pytest.approx([-x for x in reversed(above)] + [0.0, *above])
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"{tick:g}" for tick in ticks]


@pytest.mark.parametrize("name", ["a.gif", "a", "a.png.txt", "a.jpeg"])
def test_a_figure_of_an_unknown_format_is_refused_with_the_formats_there_are(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"end it in \.png, \.svg or \.pdf") as error:
        figure_kind(tmp_path / name)
    assert name in str(error.value)
    with house_style():
        figure, _ = new_figure(2.0, 2.0)
    with pytest.raises(InputError):
        save(figure, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.png", "A.PNG", "a.b.svg", "x.pdf"])
def test_figures_can_be_written_in_the_formats_there_are(name: str, tmp_path: Path) -> None:
    with house_style():
        figure, _ = new_figure(2.0, 2.0)
    assert figure_kind(name) == Path(name).suffix.lower()
    save(figure, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 0


def test_a_change_of_settings_would_be_noticed() -> None:
    with mpl.rc_context(), pytest.raises(AssertionError), matplotlib_untouched():
        mpl.rcParams["font.size"] = 99
