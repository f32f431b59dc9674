"""Families of real circuits: planted ones are separated, and everything that is said about them is what it claims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headtrace
from headtrace.circuits import write_parquet
from headtrace.errors import InputError
from headtrace.families import Families, Population, find_families, load_families
from headtrace.families.clustering import square
from headtrace.families.files import circuit_group, circuits_at
from tests.families.populations import circuits_of, drawn, fake_run, ioi, made_up, traced

TWO = [list(range(10)), list(range(5, 15))]


@pytest.fixture(scope="module")
def mixed() -> Families:
    """IOI and greater-than of the built-in model, in one population."""
    parts = [(task, *traced(task, n)) for task, n in (("ioi", 3), ("greater-than", 4))]
    circuits = [circuit for _, _, some in parts for circuit in some]
    labels = [{"task": task} for task, examples, _ in parts for _ in examples]
    return headtrace.find_families(circuits, n=2, labels=labels)


@pytest.fixture(scope="module")
def found() -> Families:
    return find_families(ioi(), "edges", n=3)


@pytest.fixture(scope="module")
def planted() -> Families:
    return find_families(circuits_of(drawn(TWO, 15, keep=0.9, noise=1)), "edges", n=2)


def test_two_tasks_of_one_model_are_separated(mixed: Families) -> None:
    agreed = mixed.agreement("task")
    assert agreed.ari >= 0.95
    assert agreed.p == pytest.approx(0.001)
    assert agreed.nmi >= 0.9


def test_families_that_are_found_without_help_do_not_mix_two_tasks(mixed: Families) -> None:
    found = find_families(mixed.population)
    tasks = mixed.population.column("task").to_list()
    for family in found.sizes:
        assert len({tasks[mixed.population.rows[id]] for id in found.members(family)}) == 1


def test_families_are_numbered_by_falling_size_and_hold_every_circuit(found: Families) -> None:
    sizes = list(found.sizes.values())
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == len(found.population)
    assert sorted(id for f in found.sizes for id in found.members(f)) == sorted(found.population.ids)


def test_a_representative_has_the_least_summed_distance_in_its_family(found: Families) -> None:
    distance = square(found.sets.matrix)
    for family, id in found.representatives.items():
        rows = np.flatnonzero(found.family == family)
        sums = distance[np.ix_(rows, rows)].sum(1)
        assert sums[list(rows).index(found.population.rows[id])] == pytest.approx(sums.min(), abs=1e-3)


def test_agreement_is_with_the_column_that_is_named(found: Families) -> None:
    assert found.agreement("order").p < 0.01
    assert found.agreement("label:order") == found.agreement("order")
    with pytest.raises(InputError, match="'form', 'order'"):
        found.agreement("colour")


def test_exclusive_edges_are_frequent_inside_and_rare_outside(planted: Families) -> None:
    table = planted.exclusive(1)
    assert table.height > 0
    sets = planted.population.sets("edges")
    inside = sets.matrix.toarray()[planted.family == 1]
    outside = sets.matrix.toarray()[planted.family == 2]
    for row in table.to_dicts():
        column = sets.items.index(row["item"])
        assert row["inside"] == pytest.approx(inside[:, column].mean())
        assert row["outside"] == pytest.approx(outside[:, column].mean())
        assert row["inside"] >= 0.5
        assert row["outside"] <= 0.1
        assert -1 <= row["low"] <= row["difference"] <= row["high"] <= 1
    assert not set(table["item"]) & set(planted.exclusive(2)["item"])


def test_exclusive_edges_of_components_are_whole_edges() -> None:
    found = find_families(ioi(), "components", n=3)
    assert {"source", "target", "channel"} <= set(found.exclusive(1).columns)
    assert found.exclusive(1)["channel"].null_count() == found.exclusive(1).height


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"within": 0.1, "outside": 0.5}, "within=0.1, outside=0.5"),
        ({"within": 1.5}, "within=1.5"),
        pytest.param({"grain": "heads"}, "grain='heads'", marks=pytest.mark.ill_typed),
    ],
)
def test_shares_that_make_no_sense_are_refused(found: Families, asked: dict, told: str) -> None:
    with pytest.raises(InputError, match=told):
        found.exclusive(1, **asked)


def test_a_family_that_is_not_there_is_an_error(found: Families) -> None:
    for ask in (found.exclusive, found.members, found.circuits):
        with pytest.raises(InputError, match="no family 7; they are numbered from 1 to 3"):
            ask(7)


def test_planted_families_come_back_in_bootstrap_samples_and_a_random_split_does_not(
    planted: Families,
) -> None:
    stable = planted.stability(30)
    assert stable.table["stable"].all()
    assert stable.table["members"].min() > 0.9  # type: ignore[operator]
    split = replace(planted, family=1 + np.arange(30) % 3).stability(30)
    assert split.table["members"].max() < 0.8  # type: ignore[operator]


def test_stability_of_one_family_is_that_of_its_merged_edges() -> None:
    found = find_families(circuits_of(drawn([list(range(12))], 30)), "edges", n=1).stability(10)
    assert found.table["members"].to_list() == [1.0]
    assert 0 < found.mean <= 1


def test_a_run_is_read_like_its_circuits() -> None:
    examples, circuits = traced("ioi", 1)
    run = fake_run(list(circuits), failed=1, order=[e.labels["order"] for e in examples])
    found = find_families(run, "edges", n=2)
    same = find_families(circuits, "edges", n=2)
    assert list(found.labels.values()) == list(same.labels.values())
    assert found.population.left_out == ("lost-0",)
    assert found.agreement("order").n == len(circuits)
    with pytest.raises(InputError, match="A run has its labels"):
        find_families(run, labels=[{}])


def test_tables_of_circuits_are_read_by_path(tmp_path: Path) -> None:
    _, circuits = traced("ioi", 1)
    path = write_parquet(circuits, tmp_path / "many.parquet")
    assert find_families(path, "edges", n=2).labels == find_families(circuits, "edges", n=2).labels


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"n": 0}, "n=0: expected a number of families from 1 to 30"),
        ({"n": 31}, "n=31"),
        ({"distance": 1.5}, "distance=1.5: expected a Jaccard distance"),
        ({"n": 2, "distance": 0.5}, "not both"),
        pytest.param(
            {"grain": "heads"},
            "grain='heads': expected one of 'components', 'edges', 'edge-channel'",
            marks=pytest.mark.ill_typed,
        ),
        ({"controls": 3}, "controls=3"),
    ],
)
def test_questions_that_make_no_sense_are_refused(planted: Families, asked: dict, told: str) -> None:
    with pytest.raises(InputError, match=told):
        find_families(planted.population, **asked)


# -- the file ------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_was_found(found: Families, tmp_path: Path) -> None:
    found.save(tmp_path)
    data = json.loads((tmp_path / "families.json").read_text())
    assert data["labels"] == found.labels
    assert data["representatives"] == {str(f): id for f, id in found.representatives.items()}
    agreed = found.agreement("order")
    assert data["agreement"]["order"] == {"ari": agreed.ari, "nmi": agreed.nmi, "p": agreed.p}
    assert set(data["agreement"]) == {"form", "order"}
    assert data["exclusive"]["1"][0]["item"] == found.exclusive(1)["item"][0]
    assert data["choice"]["by"] == "given"
    for name in ("clusters.png", "stability.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "representatives.html").read_text()
    assert page.count('"schema":"headtrace.circuit/2"') == found.n
    again = load_families(tmp_path)
    assert again.labels == found.labels
    assert again.members(2) == found.members(2)
    assert again == load_families(again.save(tmp_path / "again"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.pop("labels"), "labels: missing"),
        (lambda d: d["labels"].update(p0="one"), "labels.p0: expected a valid integer"),
        (lambda d: d.update(schema="headtrace.circuit/2"), "not a file of families"),
        (lambda d: d.update(representatives=[1]), "representatives: expected a JSON object"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_field(
    found: Families, change, told: str, tmp_path: Path
) -> None:
    data = json.loads(json.dumps(found.file.to_dict()))
    change(data)
    (tmp_path / "families.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=told):
        load_families(tmp_path)


def test_a_file_that_is_not_there_or_no_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No file of families"):
        load_families(tmp_path)
    (tmp_path / "families.json").write_text("{")
    with pytest.raises(InputError, match="JSON"):
        load_families(tmp_path)


def test_families_print_in_one_line_and_as_a_table(found: Families) -> None:
    assert repr(found).startswith(f"Families(3 of {len(found.population)} circuits by edges: ")
    assert "<table>" in found._repr_html_()
    assert "Stability(" in repr(found.stability(5))
    assert "90 circuits" in repr(found.population)


def test_other_shapes_of_one_circuit_are_equal_in_components() -> None:
    one, two = made_up([(0, 0, (1,))]), made_up([(0, 0, (2,))])
    population = Population.of([one, two, two])
    assert square(population.sets("edges").matrix).max() == 0
    assert square(population.sets("edge-channel").matrix).max() == pytest.approx(2 / 3)


def test_a_run_folder_is_taken_with_its_labels_and_roles(tmp_path: Path) -> None:
    examples, circuits = traced("ioi", 1)
    run = headtrace.run("builtin", list(examples), out=tmp_path / "ioi")
    found = find_families(run, "edges", n=2)
    assert list(found.labels.values()) == list(find_families(circuits, "edges", n=2).labels.values())
    assert found.agreement("order") == find_families(tmp_path / "ioi", "edges", n=2).agreement("order")
    first = run.prompts.filter(index=0).collect()["id"][0]
    assert found.population.roles_of(first) == dict(examples[0].roles)
    assert found.population.circuit(first) == circuits[0]
    found.save(tmp_path / "ioi" / "families")
    sides = [circuit_group(f"{tmp_path}/ioi#{f}", most=3) for f in (1, 2)]
    assert [side.name for side in sides] == ["family 1 of ioi", "family 2 of ioi"]
    one = circuits_at(f"{tmp_path}/ioi#{first[:10]}")[0]
    assert one.circuit == circuits[0]
    assert one.roles == dict(examples[0].roles)
    assert len(circuits_at(str(tmp_path / "ioi"))) == len(circuits)
