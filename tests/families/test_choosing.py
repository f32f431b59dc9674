"""How many families there are: planted ones are found, one mechanism is not split."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from scipy import sparse

import headtrace
from headtrace.families import find_families
from headtrace.families.clustering import best_matches, choose, jaccard
from headtrace.families.result import agreement as agree
from tests.families.populations import circuits_of, drawn
from tests.truth.known import KNOWN

TWO = [list(range(10)), list(range(5, 15))]
THREE = [[0, 1, *range(2, 9)], [0, 1, *range(9, 16)], [0, 1, *range(16, 23)]]


@pytest.mark.parametrize("mechanisms", [TWO, THREE], ids=["two", "three"])
def test_planted_families_are_found_and_counted(mechanisms: list[list[int]]) -> None:
    incidence = drawn(mechanisms, 30, keep=0.9, noise=1)
    found = choose(sparse.csr_array(incidence))
    assert found.n == len(mechanisms), str(found)
    assert found.p == pytest.approx(1 / 41)
    families = find_families(
        circuits_of(incidence), "edges", labels=[{"of": str(i // 30)} for i in range(len(incidence))]
    )
    assert families.agreement("of").ari >= 0.95


@pytest.mark.parametrize("seed", range(6))
def test_one_mechanism_is_not_split(seed: int) -> None:
    found = choose(sparse.csr_array(drawn([list(range(12))], 50, seed=seed)), seed=seed)
    assert found.n == 1, str(found)


def test_circuits_that_are_all_the_same_are_one_family() -> None:
    found = choose(sparse.csr_array(np.ones((20, 5), dtype=np.float32)))
    assert (found.n, found.table.height) == (1, 0)


@pytest.mark.parametrize("known", [k for k in KNOWN.values() if k.attends_for_the_answer], ids=str)
def test_a_model_built_with_one_mechanism_has_one_family_of_components(known) -> None:
    random = Random(0)
    circuits = headtrace.Tracer(known.model).trace_batch([known.draw(random).as_prompt for _ in range(40)])
    assert find_families(circuits, "components").n == 1


def test_one_large_family_with_a_few_crumbs_is_one() -> None:
    matrix = np.concatenate(
        [drawn([list(range(10))], 60, keep=1.0, noise=0), np.eye(5, 10, dtype=np.float32)]
    )
    assert choose(sparse.csr_array(matrix)).n == 1


def test_the_number_can_be_given_or_follow_from_a_distance() -> None:
    circuits = circuits_of(drawn(TWO, 10))
    assert find_families(circuits, "edges", n=4).n == 4
    assert find_families(circuits, "edges", distance=1.0).n == 1
    assert find_families(circuits, "edges", distance=0.0).n > 10
    assert find_families(circuits, "edges", n=1).choice.by == "given"


def test_large_populations_are_judged_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headtrace.families.clustering.SAMPLE", 40)
    incidence = drawn(TWO, 40, keep=0.9, noise=1)
    found = find_families(circuits_of(incidence), "edges", labels=[{"of": str(i // 40)} for i in range(80)])
    assert found.choice.circuits == found.stability(3).circuits == 40
    assert len(found.family) == 80
    assert found.agreement("of").ari >= 0.95


def test_numbers_are_reproducible_and_depend_on_nothing_but_the_seed() -> None:
    matrix = sparse.csr_array(drawn(TWO, 20))
    assert choose(matrix, seed=3).table.equals(choose(matrix, seed=3).table)


def test_matching_partitions_and_sets() -> None:
    best, similar = best_matches(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 1]))
    assert best.tolist() == [1, 0]
    assert similar.tolist() == pytest.approx([2 / 3, 1 / 2])
    assert np.isnan(best_matches(np.array([0, 2]), np.array([0, 1]))[1][1])
    assert jaccard(np.array([True, False]), np.array([True, True])) == 0.5
    assert jaccard(np.array([False]), np.array([False])) == 1.0


# -- agreement -----------------------------------------------------------------------------------------------


def test_indices_have_their_known_values() -> None:
    found = agree([0, 0, 1, 2], [0, 0, 1, 1])
    assert found.ari == pytest.approx(4 / 7)  # by hand: (1 - 1/3) / (1.5 - 1/3)
    assert found.nmi == pytest.approx(0.8)
    assert agree(["a"] * 6, list("xxxyyy")).ari == 0.0
    assert agree(["a"] * 6, ["x"] * 6).ari == 1.0


def test_p_values_count_permutations_that_do_as_well() -> None:
    label = ["ABBA", "BABA"] * 20
    found = agree(label, label, permutations=99)
    assert found.p == found.p_nmi == pytest.approx(0.01)
    chance = agree([i < 20 for i in range(40)], label, permutations=99)
    assert abs(chance.ari) < 0.05
    assert chance.p > 0.2


def test_circuits_without_the_label_are_passed_over() -> None:
    found = agree([1, 1, 2, 2, 1], ["a", "a", "b", "b", None])
    assert (found.n, found.ari) == (4, 1.0)
    assert agree([1, 2], [None, None]).n == 0
