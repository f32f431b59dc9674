"""Published circuits as data, and how far a network agrees with them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headtrace.errors import InputError
from headtrace.runs.merging import merge
from headtrace.runs.references import agreement, load_reference, reference_from_json, reference_names, score
from tests.runs.made import ROOT, circuit, head

MINE = {
    "schema": "headtrace.reference/1",
    "name": "mine",
    "model": {"name": "made-up", "n_layers": 4, "n_heads": 4},
    "heads": [
        {"layer": 3, "head": 0, "group": "mover"},
        {"layer": 3, "head": 1, "group": "mover"},
        {"layer": 1, "head": 2},
    ],
    "edges": [{"source": "L1H2", "target": "mover"}],
}


def _network(name: str = "made-up", **model: object):
    top, low = head(3, 0, 7, 1), head(1, 2, 7, 5)
    often = circuit((top, ROOT, "root", 1.0), (low, top, "query", 0.4), name=name, **model)
    once = circuit((top, ROOT, "root", 1.0), (head(0, 3, 7, 2), top, "query", 0.1), name=name, **model)
    return merge([often, often, often, once])


def test_the_ioi_circuit_of_gpt2_has_its_26_heads_in_seven_groups() -> None:
    reference = load_reference("gpt2-ioi")
    assert {group: len(heads) for group, heads in reference.groups().items()} == {
        "duplicate token": 3,
        "previous token": 2,
        "induction": 4,
        "S-inhibition": 4,
        "name mover": 3,
        "negative name mover": 2,
        "backup name mover": 8,
    }
    assert len(reference.heads) == 26
    assert reference.groups()["S-inhibition"] == ((7, 3), (7, 9), (8, 6), (8, 10))
    assert len(reference.edges) == 6
    assert "2211.00593" in (reference.source or "")
    assert (reference.model.n_layers, reference.model.n_heads) == (12, 12)


def test_the_ioi_circuit_of_pythia_has_the_12_heads_of_the_table() -> None:
    reference = load_reference("pythia-160m-ioi")
    assert {group: len(heads) for group, heads in reference.groups().items()} == {
        "previous token": 1,
        "induction": 3,
        "name mover": 4,
        "S-inhibition": 3,
        "positive copy suppression": 1,
    }
    places = {(each.layer, each.head): (each.dest, each.src) for each in reference.heads}
    assert places[8, 9] == ("end", "S2")
    assert places[2, 6] == ("S1+1", "S1")
    assert places[10, 7] == ("end", "IO")


@pytest.mark.parametrize("name", reference_names())
def test_every_reference_says_where_it_is_from(name) -> None:
    reference = load_reference(name)
    assert reference.name == name
    assert reference.source
    assert reference.title


def test_precision_recall_and_f1_at_every_threshold() -> None:
    found = agreement(_network(), reference_from_json(MINE), frequencies=(0, 0.5, 1), weights=(0, 0.3))
    rows = {(row["by"], row["threshold"]): row for row in found.table.iter_rows(named=True)}
    whole = rows["frequency", 0.0]
    assert (whole["heads"], whole["heads_right"], whole["edges"], whole["edges_right"]) == (3, 2, 2, 1)
    assert (whole["heads_precision"], whole["heads_recall"], whole["heads_f1"]) == (2 / 3, 2 / 3, 2 / 3)
    assert (whole["edges_precision"], whole["edges_recall"]) == (0.5, 0.5)
    assert (whole["links"], whole["links_recall"]) == (1, 1.0)
    half = rows["frequency", 0.5]
    assert (half["heads_precision"], half["edges_precision"]) == (1.0, 1.0)
    last = rows["frequency", 1.0]
    assert (last["heads"], last["edges"], last["edges_precision"], last["edges_f1"]) == (1, 0, None, 0.0)
    assert rows["weight", 0.3]["heads"] == 2
    assert found.best()["threshold"] == 0.5
    groups = {row["group"]: row for row in found.groups().iter_rows(named=True)}
    assert (groups["mover"]["found"], groups["mover"]["missing"]) == (1, ["L3H1"])


def test_a_reference_without_edges_compares_heads_only() -> None:
    bare = reference_from_json({key: value for key, value in MINE.items() if key != "edges"})
    found = agreement(_network(), bare)
    assert found.table["edges_f1"].null_count() == found.table.height
    with pytest.raises(InputError, match="says nothing about edges"):
        found.best(what="edges")


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_f1_is_the_harmonic_mean_of_precision_and_recall(extra, right, missed) -> None:
    precision, recall, f1 = score(right + extra, right, right + missed)
    assert recall == right / (right + missed)
    if precision is not None and precision + recall:
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall))


def test_a_reference_of_another_model_is_refused_with_both_named() -> None:
    gpt2 = load_reference("gpt2-ioi")
    large = merge([circuit((head(13, 0, 7, 1), ROOT, "root", 1.0), name="large")])
    with pytest.raises(InputError, match=r"'gpt2-small' \(12 layers of 12 heads\).*'large': it has L13H0"):
        agreement(large, gpt2)
    wide = merge([circuit((head(3, 12, 7, 1), ROOT, "root", 1.0), name="wide")])
    with pytest.raises(InputError, match="it has L3H12"):
        agreement(wide, gpt2)
    with pytest.raises(InputError, match="architecture is llama, not gpt2"):
        agreement(_network(architecture="llama"), gpt2)
    with pytest.raises(InputError, match="'builtin': that name belongs to another model"):
        agreement(_network("builtin", architecture="gpt2"), gpt2)
    for name in ("gpt2", "openai-community/gpt2", "gpt2-small", "a folder of mine"):
        assert agreement(_network(name, architecture="gpt2"), gpt2).table.height


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "x"}, 'schema: expected "headtrace.reference/1", got "x"'),
        ({"heads": []}, "heads: expected at least 1 of them"),
        ({"heads": [{"layer": 4, "head": 0}]}, r"heads\[0\]\.layer: expected a layer below 4"),
        ({"heads": [{"layer": 0, "head": 4}]}, r"heads\[0\]\.head: expected a head below 4"),
        ({"heads": [{"layer": 0, "head": 0}] * 2}, r"heads\[1\]: L0H0 occurs more than once"),
        ({"heads": [{"layer": 0}]}, r"heads\[0\]\.head: missing"),
        ({"heads": [{"layer": 0, "head": "a"}]}, r"heads\[0\]\.head: expected a valid integer"),
        ({"model": {"name": "m", "n_layers": 0, "n_heads": 4}}, r"model\.n_layers: expected a number of at least 1"),
        ({"edges": [{"source": "nobody", "target": "mover"}]}, r"edges\[0\]\.source: expected a group of heads"),
        ({"edges": [{"source": "mover", "target": "L1H2"}]}, r"edges\[0\]: expected a head of the source in a layer"),
        ({"names": []}, "names: unknown key; expected one of name, model, heads"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_is_refused_by_its_field(change, message, tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MINE | change))
    with pytest.raises(InputError, match=rf"mine\.json: {message}"):
        load_reference(path)


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(
        InputError, match=r"No reference file at ioi.*gpt2-ioi, gpt2-pronoun, pythia-160m-ioi"
    ):
        load_reference("ioi")


def test_an_edge_between_groups_stands_for_pairs_that_lead_upwards() -> None:
    reference = load_reference("gpt2-ioi")
    named = {(edge.source, edge.target): reference.pairs(edge) for edge in reference.edges}
    assert len(named["S-inhibition", "name mover"]) == 12
    assert len(named["previous token", "induction"]) == 8
    assert all(a[0] < b[0] for pairs in named.values() for a, b in pairs)
    assert replace(reference, edges=()).edges == ()


@pytest.mark.parametrize("name", ["gpt2-greater-than", "gpt2-pronoun"])
def test_references_of_heads_alone_say_where_they_come_from(name: str) -> None:
    reference = load_reference(name)
    assert (len(reference.heads), reference.edges) == (8, ())
    assert len({(head.layer, head.head) for head in reference.heads}) == 8
    assert reference.source
    assert "MLPs" in (reference.notes or "")
