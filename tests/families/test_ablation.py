"""Exclusive edges, ablated where a prompt has them: what is taken away, what is counted as missing, what it shows."""

from __future__ import annotations

import numpy as np
import pytest

from headtrace.causal.experiments import joint_changes
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE
from headtrace.errors import InputError
from headtrace.families import ExclusiveAblation, Families, Population, find_families
from headtrace.families.ablation import EdgeItem, RolePlace, UsualPlace, usual_place
from headtrace.vocabulary import ATTENTION_SIDES
from tests.families.populations import builtin, circuits_of, drawn, ioi


@pytest.fixture(scope="module")
def found() -> Families:
    return find_families(ioi(), "edges", n=3)


@pytest.fixture(scope="module")
def ablated(found: Families) -> ExclusiveAblation:
    return found.ablate_exclusive(builtin(), prompts=8, draws=2)


def test_exclusive_edges_hurt_their_own_family_more(ablated: ExclusiveAblation) -> None:
    row = ablated.contrasts().row(0, named=True)
    assert row["difference_high"] < 0
    assert row["difference_applied_high"] < 0


def test_what_is_taken_away_is_what_the_circuit_says(found: Families, ablated: ExclusiveAblation) -> None:
    family = int(ablated.table["edges_of"][0])
    wanted = [EdgeItem(*item.split(" => ")) for item in ablated.edges[family]]
    row = ablated.table.filter((ablated.table["missing"] == 0) & (ablated.table["placed"] == 0)).row(
        0, named=True
    )
    circuit = found.population.circuit(row["prompt"])
    edges = tuple(edge for each in wanted for edge in each.edges(circuit))
    assert row["signals"] == len(edges)
    recording = open_circuit(circuit, builtin())
    metric = require_metric(circuit.root, recording, "it")
    changed = joint_changes(recording, circuit, metric, [edges], factor=ABLATE, reach="local", scope="claim")
    assert row["change"] == pytest.approx(changed[edges], abs=1e-4)
    assert row["clean"] == pytest.approx(metric.of(recording), abs=1e-5)


def test_every_edge_is_found_placed_or_missing(ablated: ExclusiveAblation) -> None:
    table = ablated.table
    assert (table["found"] + table["placed"] + table["missing"] == table["edges"]).all()
    own = table.filter("own")
    assert (own["found"] > 0).all()
    assert table.filter(~table["own"])["placed"].sum() > 0, "other prompts have roles, so edges can be placed"
    assert table.filter(table["signals"] > 0)["change"].null_count() == 0


def test_without_roles_what_a_circuit_does_not_have_is_missing(found: Families) -> None:
    population = found.population
    bare = Population.of([population.circuit(id) for id in population.ids], ids=population.ids)
    without = find_families(bare, "edges", n=3).ablate_exclusive(builtin(), prompts=4, draws=1)
    assert without.table["placed"].sum() == 0
    assert without.table["missing"].sum() > 0
    unapplied = without.table.filter(without.table["signals"] == 0)
    assert unapplied["change"].null_count() == unapplied.height


def test_controls_are_other_edges_of_the_prompts_own_circuit(
    found: Families, ablated: ExclusiveAblation
) -> None:
    for row in ablated.table.filter("own").to_dicts():
        circuit = found.population.circuit(row["prompt"])
        inner = {edge for edge in circuit.edges if edge.side in ATTENTION_SIDES}
        wanted = [EdgeItem(*item.split(" => ")) for item in ablated.edges[row["edges_of"]]]
        others = inner - {edge for each in wanted for edge in each.edges(circuit)}
        assert row["random_signals"] == min(row["signals"], len(others))


def test_intervals_hold_their_means_and_edges_into_the_root_are_counted(ablated: ExclusiveAblation) -> None:
    for row in ablated.summary().to_dicts():
        assert row["change_low"] <= row["change"] <= row["change_high"]
    assert sum(ablated.not_signals.values()) > 0
    assert set(ablated.to_dict()) == {"metric", "edges", "into_root_not_ablated", "summary", "contrasts"}


def test_one_channel_of_an_edge_is_ablated_alone() -> None:
    found = find_families(ioi(), "edge-channel", n=3)
    ablated = found.ablate_exclusive(builtin(), prompts=2, draws=0)
    assert all(" #" in item for edges in ablated.edges.values() for item in edges)
    assert ablated.table["random"].null_count() == ablated.table.height


def test_a_place_in_the_words_of_roles_is_the_same_place_again() -> None:
    population = ioi()
    placed = 0
    for id in population.ids[:10]:
        circuit, roles = population.circuit(id), population.roles_of(id)
        for edge in circuit.edges:
            place = RolePlace.of(circuit, edge, roles) if edge.side in ATTENTION_SIDES else None
            if place is not None and circuit.node(edge.source).kind in ("head", "mlp"):
                signal = UsualPlace(place, edge.channels or ()).signal(roles, len(circuit.prompt.token_ids))
                assert signal is not None
                assert signal.firing == circuit.node(edge.target).site.firing
                assert signal.component == circuit.node(edge.source).site.component
                placed += 1
    assert placed > 20


def test_roles_in_an_impossible_order_are_no_place() -> None:
    population = ioi()
    circuit, roles = population.circuit("p0"), population.roles_of("p0")
    edge = next(
        e for e in circuit.edges if e.side in ATTENTION_SIDES and RolePlace.of(circuit, e, roles) is not None
    )
    place = RolePlace.of(circuit, edge, roles)
    assert place is not None
    turned = {name: 14 - at for name, at in roles.items()}
    usual = UsualPlace(place, (1,))
    assert usual.signal(turned, 15) is None or place.src == place.dest
    assert usual.signal({}, 15) is None
    assert usual_place(EdgeItem("L9H9", "L9H8"), [(circuit, roles)]) is None


def test_one_family_or_families_without_edges_of_their_own_are_refused() -> None:
    made = find_families(circuits_of(drawn([list(range(12))], 20)), "edges", n=1)
    with pytest.raises(InputError, match="There is one family"):
        made.ablate_exclusive(builtin())
    same = find_families(circuits_of(np.ones((6, 8), dtype=np.float32)), "edges", n=2)
    with pytest.raises(InputError, match="No family has an edge"):
        same.ablate_exclusive(builtin())


def test_circuits_of_another_model_are_refused() -> None:
    made = find_families(circuits_of(drawn([list(range(8)), list(range(8, 16))], 10)), "edges", n=2)
    with pytest.raises(InputError, match="can only be tested on its own model"):
        made.ablate_exclusive(builtin())
