"""Circuits as sets at three grains, their distances, their tree and its cuts: against plain definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
import psutil
import pytest
from scipy import sparse
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import silhouette_score

from headtrace.errors import InputError, OutOfMemoryError
from headtrace.families import Population, clustering
from headtrace.families.clustering import (
    average_linkage,
    blocks,
    clusters_below,
    condensed,
    cuts,
    separation,
    shuffled,
    square,
    sums_to_clusters,
)
from headtrace.families.population import GRAINS, component_name, component_names
from headtrace.vocabulary import KINDS, Site
from tests.families.populations import fake_run, ioi, made_up, traced

CIRCUITS = [made_up([(0, 0, (1, 2)), (1, 0, (3,))]), made_up([(0, 0, (1,))]), made_up([(0, 1, (1,))])]


def test_positions_and_what_every_circuit_has_do_not_count() -> None:
    population = Population.of(CIRCUITS)
    assert population.sets("components").items == ("L0H0", "L0H1", "L1H0", "L1H1")
    assert population.sets("edges").items == (
        "L0H0 => L1H0", "L0H0 => L1H1", "L0H1 => L1H0", "L1H0 => root", "L1H1 => root",
    )  # fmt: skip
    channels = population.sets("edge-channel")
    assert [channels.items[i] for i in np.flatnonzero(channels.matrix.toarray()[0])] == [
        "L0H0 => L1H0 #1", "L0H0 => L1H0 #2", "L0H1 => L1H0 #3", "L1H0 => root",
    ]  # fmt: skip


def test_components_have_one_name_whoever_names_them() -> None:
    sites = [Site(kind, 3, 1) for kind in KINDS]
    table = pl.DataFrame({"kind": KINDS, "layer": [3] * len(KINDS), "head": [1] * len(KINDS)})
    assert table.select(component_names().alias("name"))["name"].to_list() == [
        component_name(site) for site in sites
    ]


@pytest.mark.parametrize("grain", GRAINS)
def test_a_run_and_its_circuits_make_the_same_population(grain: str) -> None:
    _, circuits = traced("ioi", 1)
    one, other = Population.of(circuits), Population.of_run(fake_run(list(circuits), failed=2))
    a, b = one.sets(grain), other.sets(grain)  # type: ignore[arg-type]
    assert a.items == b.items
    assert (a.matrix != b.matrix).nnz == 0
    assert other.left_out == ("lost-0", "lost-1")
    assert other.roles_of("prompt-0") == {"end": 2}
    assert other.circuit("prompt-3") == circuits[3]


def test_circuits_without_edges_are_left_out_and_named() -> None:
    empty = made_up([])
    population = Population.of(
        [*CIRCUITS, empty], ids=["a", "b", "c", "none"], labels=[{"x": str(i)} for i in range(4)]
    )
    assert population.ids == ("a", "b", "c")
    assert population.left_out == ("none",)
    assert population.labels["x"].to_list() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("circuits", "told"),
    [
        (CIRCUITS[:2], "at least 3 circuits that have edges: there are 2 circuits."),
        ([made_up([])] * 5, "5 circuits, and none of them has edges"),
        ([], "there are 0 circuits"),
    ],
)
def test_too_few_circuits_are_refused_with_their_number(circuits: list, told: str) -> None:
    with pytest.raises(InputError, match=told.replace(".", "\\.")):
        Population.of(circuits)


def test_circuits_of_two_models_are_refused_with_both_hashes() -> None:
    with pytest.raises(InputError) as error:
        Population.of([*CIRCUITS, made_up([(0, 0, (1,))], sha="cd" * 32)])
    assert f"weights {'ab' * 6}" in str(error.value)
    assert f"weights {'cd' * 6}" in str(error.value)


def test_labels_must_be_as_many_as_circuits_and_ids_their_own() -> None:
    with pytest.raises(InputError, match="2 labels for 3 circuits"):
        Population.of(CIRCUITS, [{}, {}])
    with pytest.raises(InputError, match="same id"):
        Population.of(CIRCUITS, ids=["a", "a", "b"])


def _random(n: int = 40, items: int = 30) -> sparse.csr_array:
    rng = np.random.default_rng(1)
    matrix = (rng.random((n, items)) < rng.random(items)).astype(np.float32)
    matrix[3] = matrix[7] = 0
    return sparse.csr_array(matrix)


@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 26])
def test_distances_are_those_of_the_definition_in_blocks_of_any_size(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustering, "_BLOCK", block)
    matrix = _random()
    expected = pdist(matrix.toarray().astype(bool), "jaccard")
    np.testing.assert_allclose(condensed(matrix), expected, atol=2 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(square(matrix), squareform(expected), atol=2 * np.finfo(np.float32).eps)
    assert condensed(matrix).dtype == np.float32
    assert sum(part.shape[0] for _, part in blocks(matrix)) == 40
    clusters = np.arange(40) % 3
    sums = sums_to_clusters(matrix, clusters, 3)
    np.testing.assert_allclose(
        sums[5], [squareform(expected)[5, clusters == c].sum() for c in range(3)], rtol=1e-5
    )


def test_a_population_that_does_not_fit_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 10_000})())
    with pytest.raises(OutOfMemoryError, match="enough for about 31 circuits"):
        condensed(_random())


def test_a_tree_is_cut_into_exactly_as_many_as_asked_even_where_merges_tie() -> None:
    tree = average_linkage(condensed(sparse.csr_array(np.eye(6, dtype=np.float32))))  # all distances are 1
    found = cuts(tree, 6)
    assert [len(set(row)) for row in found] == [1, 2, 3, 4, 5, 6]
    for coarse, fine in pairwise(found):
        assert len({(a, b) for a, b in zip(coarse, fine, strict=True)}) == fine.max() + 1  # nested
    assert clusters_below(tree, 0.5) == 6
    assert clusters_below(tree, 1.0) == 1


def test_silhouettes_are_those_of_the_definition_and_of_scikit_learn() -> None:
    distance = square(_random())
    for clusters, value in zip(*separation(distance, 5), strict=True):
        exact = distance.astype(float)
        assert value == pytest.approx(_naive(exact, clusters), abs=1e-9)
        assert value == pytest.approx(silhouette_score(exact, clusters, metric="precomputed"), abs=1e-9)


def _naive(distance: np.ndarray, clusters: np.ndarray) -> float:
    values = []
    for i, own in enumerate(clusters):
        means = {}
        for c in set(clusters.tolist()):
            others = [j for j in np.flatnonzero(clusters == c) if j != i]
            if others:
                means[c] = distance[i, others].mean()
        rest = [m for c, m in means.items() if c != own]
        if own not in means or not rest:
            values.append(0.0)
            continue
        inside, outside = means[own], min(rest)
        values.append((outside - inside) / max(inside, outside) if max(inside, outside) else 0.0)
    return float(np.mean(values))


def test_the_control_keeps_sizes_and_frequencies_and_nothing_that_goes_together() -> None:
    half = np.kron(np.eye(2), np.ones((30, 12))).astype(np.float32)  # two families with nothing in common
    matrix = sparse.csr_array(half)
    mixed = shuffled(matrix, np.random.default_rng(0))
    assert (mixed.sum(axis=0) == matrix.sum(axis=0)).all()
    assert (mixed.sum(axis=1) == matrix.sum(axis=1)).all()
    assert set(np.unique(mixed.toarray())) == {0.0, 1.0}
    inside = mixed.toarray()[:30, :12].mean()
    assert 0.35 < inside < 0.65, "half of every circuit's items are now of the other family"


def test_a_label_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(InputError, match="'form', 'order'"):
        ioi().column("gender")
    assert ioi().column("label:order").to_list() == ioi().column("order").to_list()
