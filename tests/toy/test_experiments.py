"""Every experiment, in its quick version, shows what it is there for; its files come from its seed alone.

Training carries the last bit of a rounding into everything, so what is asked of a trained model holds with room to
spare: a comment gives the worst value met over seeds 0 to 3. Plain, AVX2 and AVX-512 kernels differ by far less, 1e-5
at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from headtrace.cli.main import app, main
from headtrace.figures.toy import FIGURES, draw
from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments import EXPERIMENTS
from headtrace.toy.experiments.features import capacity_summary
from tests.figures.labels import missing_labels
from tests.figures.untouched import matplotlib_untouched


@cache
def quick(name: str) -> Experiment:
    return EXPERIMENTS[name].run(quick=True, seed=0)


def _read(findings: Mapping[str, object], *path: str) -> float:
    value: object = findings
    for key in path:
        assert isinstance(value, Mapping)
        value = value[key]
    assert isinstance(value, (int, float))
    return float(value)


def test_features_without_a_head_form_antipodal_pairs_in_all_directions() -> None:
    shown = quick("isotropy").table.filter(pl.col("probability") == 0.2)
    assert shown["antipodal_pairs"].to_list() == [10, 10], "every feature has its opposite: cosines near -1"
    assert shown["isotropy_error"].to_numpy().max() < 0.05  # worst: 0.021


def test_one_pair_takes_the_top_singular_pair() -> None:
    findings = quick("single").findings
    assert _read(findings, "aligned", "smallest_cosine") > 0.99  # worst: 0.9988
    assert _read(findings, "weak_head", "largest_interference_of_the_pair") > 0.99  # worst: 0.99999


def test_several_pairs_align_in_order() -> None:
    findings = quick("multi").findings
    assert _read(findings, "pairs_aligned_in_order") == _read(findings, "pairs_of_all_seeds") == 3
    assert _read(findings, "smallest_cosine") > 0.95  # worst: 0.991


def test_alignment_is_timed_and_ends_high() -> None:
    table = quick("dynamics").table
    default = table.filter(pl.col("initial") == 1.0)
    assert default["final_cosine"].to_numpy().min() > 0.95  # worst: 0.978
    assert default["aligned_at"].null_count() == 0
    assert (default["aligned_at"] > 0).all()


def test_attention_is_sparser_the_fewer_features_of_interest_there_are_and_not_without_them() -> None:
    findings = quick("sparsity").findings
    one, two, none = (_read(findings, "sparseness_after_training", name) for name in ("one", "two", "none"))
    assert one + 0.02 < two < none - 0.02  # closest: 0.050 and 0.061
    assert one < 0.15  # worst: 0.111, of a least possible 0.1
    assert _read(findings, "sparseness_after_training_rotated", "one") > 1.5 * one  # worst: 2.16 times
    assert _read(findings, "term_against_product_of_strengths", "smallest_correlation") > 0.9  # worst: 0.938


def test_sweeps_align_except_where_features_are_too_rare() -> None:
    table = quick("robustness").table
    worst = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    rare = worst.filter(pl.col("sweep") == "probability", pl.col("value") == 0.02)
    common = worst.filter((pl.col("sweep") != "probability") | (pl.col("value") > 0.02))
    assert common["cosine"].to_numpy().min() > 0.95  # worst: 0.987
    assert rare["cosine"].to_numpy().min() < 0.6  # worst: 0.427


def test_beyond_capacity_the_highest_pairs_keep_their_channels_and_the_others_share() -> None:
    table = quick("capacity").table
    summed = capacity_summary(table)
    assert summed["pairs"].to_list() == [5, 7]
    assert summed["high"].to_list() == [4, 4]
    own = table.filter(pl.col("pair") < 4)
    assert (own["channel"] == own["pair"]).all()
    assert own.select(pl.min_horizontal("query_cosine", "key_cosine")).to_numpy().min() > 0.9  # worst: 0.959
    sharing = table.filter(pl.col("pairs") == 7, pl.col("pair") >= 4)
    assert sharing["channel"].n_unique() < len(sharing)
    assert (sharing["channel"] >= 3).all(), (
        "the smallest channel, or, where it is not yet learned, the one before"
    )


def test_what_a_head_at_capacity_shares_is_counted_by_channel() -> None:
    rows = [(0, 0, 0.99), (1, 1, 0.99), (2, 2, 0.90), (3, 3, 0.99), (4, 4, 0.99), (5, 4, 0.8), (6, 3, 0.7)]
    columns = {"d_head": 5, "pairs": 7, "steps": 1, "seed": 0, "smallest_singular_value": 1.0}
    table = pl.DataFrame(
        [{**columns, "pair": p, "channel": c, "query_cosine": x, "key_cosine": 1.0} for p, c, x in rows]
    )
    (found,) = capacity_summary(table).to_dicts()
    assert (found["high_with_own_channel"], found["high"]) == (3, 4), "pair 2 is not close enough"
    assert (found["low_on_last_channel"], found["low"]) == (2, 3), "pair 6 is on another channel"


def test_the_four_theorems_hold() -> None:
    findings, eps = quick("theorems").findings, float(np.finfo(np.float64).eps)
    # Sums over 4,096 cases, and a curvature of which the least is above 1e-4 of the largest.
    minimised = 1e4 * 4096 * eps
    assert _read(findings, "theorem_1", "relative_error_of_omega") < minimised
    assert _read(findings, "theorem_1", "sine_to_whitened_features") < minimised
    assert _read(findings, "theorem_1", "sine_to_features") > 0.1
    assert _read(findings, "theorem_2", "sine_by_optimisation") < minimised
    # Frames of up to 100 vectors in 50 dimensions: a product, its inverse, an SVD.
    assert _read(findings, "theorem_2", "sine_by_closed_form") < 100 * 50 * eps
    assert _read(findings, "theorem_3", "violations") == 0
    assert _read(findings, "theorem_3", "feature_sets") >= 40
    assert _read(findings, "theorem_4", "violations") == 0
    # The zero of a slope that rounding makes uncertain by eps times the logits, over a curvature of lambda or more.
    assert _read(findings, "theorem_4", "largest_overlap_when_orthogonality_costs_nothing") < 1e4 * eps


def test_recovery_falls_with_interference() -> None:
    ideal = quick("recovery").table.filter(pl.col("kind") == "ideal")
    clean = ideal.filter(pl.col("interference") < 0.1)
    noisy = ideal.filter(pl.col("interference") > 0.6, pl.col("interference") < 0.9)
    assert clean["recovered"].to_numpy().mean() > 0.95
    assert noisy["recovered"].to_numpy().mean() < clean["recovered"].to_numpy().mean() - 0.2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_are_drawn_with_a_title_and_names_of_their_axes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: dict[str, list[str]] = {}

    def looked_at(figure: str, drawing: Any) -> Any:
        def drawn(*given: Any) -> Any:
            found = drawing(*given)
            missing[figure] = missing_labels(found)
            return found

        return drawn

    drawings = {figure: looked_at(figure, drawing) for figure, drawing in FIGURES[name].items()}
    monkeypatch.setitem(FIGURES, name, drawings)
    with matplotlib_untouched():
        paths = draw(quick(name), tmp_path)
    assert [path.name for path in paths] == [f"toy-{figure}.png" for figure in drawings]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert missing == {figure: [] for figure in drawings}


def test_the_command_writes_table_findings_and_figures_that_its_seed_repeats(tmp_path: Path) -> None:
    tables: list[pl.DataFrame] = []
    for folder, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        out = tmp_path / folder
        result = CliRunner().invoke(app, ["toy", "theorems", "--quick", "--seed", seed, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert {path.name for path in out.iterdir()} == {
            f"toy-theorems.{e}" for e in ("json", "parquet", "png")
        }
        assert json.loads((out / "toy-theorems.json").read_text())["seed"] == int(seed)
        # Those of theorem 3; the errors of the others are rounding, whatever the seed.
        tables.append(pl.read_parquet(out / "toy-theorems.parquet").filter(pl.col("theorem") == 3))
    assert_frame_equal(tables[0], tables[1])
    assert tables[0].height != tables[2].height or not np.allclose(
        tables[0]["measured"], tables[2]["measured"]
    )


def test_an_unknown_experiment_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["toy", "nonsense"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "nonsense" in told
    assert "robustness" in told
