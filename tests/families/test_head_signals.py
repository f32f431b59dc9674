"""What heads read in two circuits: cosines against their definition, controls, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import Signal, coefficients
from headtrace.errors import InputError
from headtrace.families import compare_signals
from headtrace.families.head_signals import SignalComparison, head_signals
from tests.families.populations import builtin, ioi, made_up, traced
from tests.rounding import rounding


@pytest.fixture(scope="module")
def circuits():
    _, found = traced("ioi", 3)
    return [c for c in found if len(c.edges) > 20][:8]


def test_a_circuit_reads_the_same_as_itself(circuits) -> None:
    found = compare_signals(circuits[0], circuits[0], builtin())
    assert found.table.height > 4
    assert found.table["cosine"].to_list() == pytest.approx([1.0] * found.table.height)
    assert found.table["low"].null_count() == found.table["control"].null_count() == found.table.height
    assert found.same.height == found.table.height


def test_a_heads_signal_is_the_sum_of_its_incoming_signals(circuits) -> None:
    circuit = circuits[0]
    signals = head_signals(circuit, builtin())
    recording = open_circuit(circuit, builtin())
    for (layer, head, side), vector in signals.items():
        total = torch.zeros(builtin().d_model, dtype=torch.float64)
        for node in circuit.heads():
            if (node.layer, node.head) != (layer, head):
                continue
            for edge in circuit.edges_into(node):
                if edge.side == side:
                    reader, values = coefficients(recording, Signal.of(circuit, edge), "token")
                    total += reader.in_residual(values).sum(0).double()  # zero everywhere else
        bound = rounding(torch.float32, 64 * builtin().d_model, float(total.abs().max()))
        np.testing.assert_allclose(vector, total.numpy(), atol=bound)


def test_families_are_compared_pair_by_pair_on_average(circuits) -> None:
    a, b = circuits[:4], circuits[4:]
    found = compare_signals(a, b, builtin(), names=("one", "other"))
    row = found.table.filter((found.table["in_a"] == 4) & (found.table["in_b"] == 4)).row(0, named=True)
    key = (row["layer"], row["head"], row["side"])
    units = [[_unit(head_signals(c, builtin())[key]) for c in side] for side in (a, b)]
    pairs = [x @ y for x in units[0] for y in units[1]]
    assert row["cosine"] == pytest.approx(np.mean(pairs))
    within = [np.mean([x @ y for i, x in enumerate(u) for y in u[:i]]) for u in units]
    assert row["control"] == pytest.approx(np.mean(within))
    assert row["low"] <= row["cosine"] <= row["high"]


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_heads_are_sorted_by_what_their_cosine_says(circuits) -> None:
    table = compare_signals(circuits[0], circuits[0], builtin()).table.head(4)
    table = table.with_columns(cosine=np.array([0.95, 0.1, -0.8, 0.5]), control=0.9, in_a=4, in_b=4)
    found = SignalComparison(table, ("a", "b"), (4, 4), 3, 4)
    assert [found.same.height, found.other.height, found.opposite.height] == [1, 1, 1]
    assert found.undecided.is_empty()
    assert [found.verdict(v, 0.9, 4, 4) for v in (0.95, 0.1, -0.8, 0.5, -0.2)] == [
        "the same", "something else", "the opposite", "partly the same", "something else",
    ]  # fmt: skip


def test_no_verdict_contradicts_its_control(circuits) -> None:
    """A head that varies within its families as much as between them, or that one circuit has, reads nothing else."""
    table = compare_signals(circuits[0], circuits[0], builtin()).table.head(3)
    table = table.with_columns(cosine=np.array([0.04, -0.8, -1.0]), in_a=4, in_b=4)
    varying = SignalComparison(table.with_columns(control=0.08), ("a", "b"), (4, 4), 3, 4)
    assert varying.other.is_empty()
    assert varying.opposite.is_empty()
    assert varying.undecided.height == 3
    assert varying.verdict(0.04, 0.08, 4, 4) == "varies within families, too"
    single = SignalComparison(table.with_columns(control=None, in_a=1), ("a", "b"), (1, 4), 3, 4)
    assert single.undecided.height == 3
    assert single.verdict(-1.0, None, 1, 4) == "not enough circuits"
    assert len(single.to_dict()["undecided"]) == 3


def test_it_is_saved_as_numbers_and_a_figure(circuits, tmp_path) -> None:
    found = compare_signals(circuits[:2], circuits[2:4], builtin())
    found.save(tmp_path)
    data = json.loads((tmp_path / "signals.json").read_text())
    assert len(data["table"]) == found.table.height
    assert (tmp_path / "signals.png").read_bytes().startswith(b"\x89PNG")
    assert "head sides" in repr(found)


def test_circuits_of_two_models_are_refused_with_both_hashes(circuits) -> None:
    other = made_up([(0, 0, (1,))], sha="cd" * 32)
    with pytest.raises(InputError) as error:
        compare_signals(circuits[0], other, builtin())
    assert f"weights {'cd' * 6}" in str(error.value)
    assert f"weights {circuits[0].model.weights_sha256[:12]}" in str(error.value)
    with pytest.raises(InputError, match="no circuit on one side"):
        compare_signals([], circuits[0], builtin())


def test_families_of_a_population_are_taken_as_they_are() -> None:
    population = ioi()
    found = compare_signals([population.circuit("p0")], [population.circuit("p1")], builtin())
    assert found.circuits == (1, 1)
