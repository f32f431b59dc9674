"""Every experiment, in its quick version, shows what it is there for; its files come from its seed alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from headtrace.cli.main import app, main
from headtrace.figures.toy import FIGURES, draw
from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments import EXPERIMENTS
from headtrace.toy.experiments.capacity import summary as capacity_summary


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
    assert shown["antipodal_pairs"].to_list() == [10, 10]
    assert shown["isotropy_error"].to_numpy().max() < 0.05


def test_one_pair_takes_the_top_singular_pair() -> None:
    findings = quick("single").findings
    assert _read(findings, "aligned", "smallest_cosine") > 0.99
    assert _read(findings, "weak_head", "largest_interference_of_the_pair") > 0.99


def test_several_pairs_align_in_order() -> None:
    findings = quick("multi").findings
    assert _read(findings, "pairs_aligned_in_order") == _read(findings, "pairs_of_all_seeds")


def test_alignment_is_timed_and_ends_high() -> None:
    table = quick("dynamics").table
    default = table.filter(pl.col("initial") == 1.0)
    assert default["final_cosine"].to_numpy().min() > 0.95
    assert default["aligned_at"].null_count() == 0
    assert (default["aligned_at"] > 0).all()


def test_attention_is_sparser_the_fewer_features_of_interest_there_are_and_not_without_them() -> None:
    findings = quick("sparsity").findings
    one, two, none = (_read(findings, "sparseness_after_training", name) for name in ("one", "two", "none"))
    assert one < two < none
    assert one < 0.2
    assert _read(findings, "sparseness_after_training_rotated", "one") > 2 * one
    assert _read(findings, "term_against_product_of_strengths", "smallest_correlation") > 0.95


def test_sweeps_align_except_where_features_are_too_rare() -> None:
    table = quick("robustness").table
    worst = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    rare = worst.filter(pl.col("sweep") == "probability", pl.col("value") == 0.02)
    common = worst.filter((pl.col("sweep") != "probability") | (pl.col("value") > 0.02))
    assert common["cosine"].to_numpy().min() > 0.98
    assert rare["cosine"].to_numpy().min() < 0.9


def test_beyond_capacity_the_highest_pairs_keep_their_channels_and_the_others_share_the_smallest() -> None:
    summed = capacity_summary(quick("capacity").table)
    assert summed["pairs"].to_list() == [5, 7]
    assert summed["high_with_own_channel"].to_list() == summed["high"].to_list() == [4, 4]
    over = quick("capacity").table.filter(pl.col("pairs") == 7)
    assert over["channel"].to_list() == [0, 1, 2, 3, 4, 4, 4]


def test_the_four_theorems_hold() -> None:
    findings = quick("theorems").findings
    assert _read(findings, "theorem_1", "relative_error_of_omega") < 1e-7
    assert _read(findings, "theorem_1", "sine_to_whitened_features") < 1e-7
    assert _read(findings, "theorem_1", "sine_to_features") > 0.1
    assert _read(findings, "theorem_2", "sine_by_optimisation") < 1e-7
    assert _read(findings, "theorem_2", "sine_by_closed_form") < 1e-12
    assert _read(findings, "theorem_3", "violations") == 0
    assert _read(findings, "theorem_3", "feature_sets") >= 40
    assert _read(findings, "theorem_4", "violations") == 0
    assert _read(findings, "theorem_4", "largest_overlap_when_orthogonality_costs_nothing") < 1e-9


def test_recovery_falls_with_interference() -> None:
    ideal = quick("recovery").table.filter(pl.col("kind") == "ideal")
    clean = ideal.filter(pl.col("interference") < 0.1)
    noisy = ideal.filter(pl.col("interference") > 0.6, pl.col("interference") < 0.9)
    assert clean["recovered"].to_numpy().mean() > 0.95
    assert noisy["recovered"].to_numpy().mean() < clean["recovered"].to_numpy().mean() - 0.2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_are_drawn(name: str, tmp_path: Path) -> None:
    paths = draw(quick(name), tmp_path)
    assert [path.name for path in paths] == [f"toy-{figure}.png" for figure in FIGURES[name]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_the_command_writes_table_findings_and_figures_that_its_seed_repeats(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        result = CliRunner().invoke(
            app, ["toy", "theorems", "--quick", "--seed", "4", "--out", str(tmp_path / folder)]
        )
        assert result.exit_code == 0, result.output
    for name in ("toy-theorems.json", "toy-theorems.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    a, b = (pl.read_parquet(tmp_path / folder / "toy-theorems.parquet") for folder in ("a", "b"))
    assert a.equals(b)
    assert json.loads((tmp_path / "a" / "toy-theorems.json").read_text())["seed"] == 4


def test_an_unknown_experiment_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["toy", "nonsense"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "nonsense" in told
    assert "robustness" in told
