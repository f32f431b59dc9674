"""Circuits side by side: what is shared, by position, by role, by component; checkpoints; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.families import compare_circuits
from tests.families.populations import ioi, made_up, traced

ill_typed = pytest.mark.ill_typed


def test_shared_and_exclusive_items_are_those_of_the_sets() -> None:
    one, two = made_up([(0, 0, (1,)), (1, 0, (2,))]), made_up([(0, 0, (3,)), (2, 1, (1,))])
    found = compare_circuits([one, two], names=("one", "two"), by="components")
    assert found.shared["item"].to_list() == ["L0H0", "L1H0", "L1H0 => root", "L0H0 => L1H0"]
    assert found.exclusive("one").filter(kind="edge")["item"].to_list() == ["L0H1 => L1H0"]
    assert found.exclusive(1).filter(kind="node")["item"].to_list() == ["L0H2", "L1H1"]
    assert found.similarity[0, 1] == pytest.approx(2 / 5)
    fine = compare_circuits([one, two], grain="edge-channel", by="components")
    assert fine.shared.filter(kind="edge")["item"].to_list() == ["L1H0 => root"]
    coarse = compare_circuits([one, two], grain="components", by="components")
    assert set(coarse.table["kind"]) == {"node"}
    assert coarse.similarity[0, 1] == pytest.approx(2 / 5)


def test_one_prompt_is_matched_by_position_and_several_by_component() -> None:
    examples, circuits = traced("ioi", 1)
    assert compare_circuits([circuits[0], circuits[0].prune(min_influence=0.1)]).by == "positions"
    assert compare_circuits(circuits[:2]).by == "components"
    assert "The prompts differ" in compare_circuits(circuits[:2], by="positions").warnings[0]
    assert examples[0].roles != examples[1].roles


def test_roles_match_what_positions_do_not() -> None:
    population = ioi()
    ids = population.ids[:2] if len(population.circuit("p0").edges) else population.ids[2:4]
    circuits = [population.circuit(id) for id in ids]
    roles = [population.roles_of(id) for id in ids]
    found = compare_circuits(circuits, by="roles", roles=roles)
    assert any("end->IO" in item for item in found.table["item"])
    assert not found.warnings
    without = compare_circuits(circuits, by="roles")
    assert "2 of 2 circuits come without roles" in without.warnings[0]
    assert not any("IO" in item for item in without.table["item"])


def test_a_comparison_is_written_as_a_latex_table(tmp_path: Path) -> None:
    found = compare_circuits([made_up([(0, 0, (1,))]), made_up([(0, 1, (1,))])], grain="edges")
    written = found.write_latex(tmp_path / "c.tex").read_text()
    assert written.count(r"\\") == found.table.height + 1
    assert all(name.replace("_", r"\_") in written for name in found.table.columns)


def test_in_the_order_of_training_it_is_said_which_edges_appear_and_disappear_when() -> None:
    steps = [
        made_up([(0, 0, (1,))]),
        made_up([(0, 0, (1,)), (1, 0, (1,))]),
        made_up([(1, 0, (1,)), (2, 0, (1,))]),
    ]
    steps = [
        replace(c, model=replace(c.model, name=f"step{i}", weights_sha256=str(i) * 64))
        for i, c in enumerate(steps)
    ]
    found = compare_circuits(steps, names=("step0", "step1", "step2"), by="components")
    assert [found.appearing(i).filter(kind="edge")["item"].to_list() for i in range(3)] == [
        ["L1H0 => root", "L0H0 => L1H0"], ["L0H1 => L1H0"], ["L0H2 => L1H0"],
    ]  # fmt: skip
    assert found.disappearing("step1").filter(kind="edge")["item"].to_list() == ["L0H0 => L1H0"]
    assert found.disappearing("step2").height == 0
    assert "The weights differ" in found.warnings[0]
    assert "0" * 12 in found.warnings[0]
    with pytest.raises(InputError, match="channels are computed from weights"):
        compare_circuits(steps, grain="edge-channel")


def _other(circuit: Circuit, **changes: str) -> Circuit:
    return replace(circuit, model=replace(circuit.model, **{"weights_sha256": "cd" * 32, **changes}))


def test_different_models_are_refused_with_both_hashes() -> None:
    one = made_up([(0, 0, (1,))])
    longer = _other(made_up([(0, 0, (1,))], length=5), name="elsewhere")
    for other in (_other(one, architecture="llama"), longer):
        with pytest.raises(InputError) as error:
            compare_circuits([one, other])
        assert "ab" * 6 in str(error.value)
        assert "cd" * 6 in str(error.value)
    assert compare_circuits([one, _other(made_up([(0, 0, (1,))], length=5))]).warnings, (
        "revisions of one model"
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"circuits": 1}, "at least two circuits"),
        ({"names": ("a", "a")}, "name of its own"),
        pytest.param(
            {"by": "words"}, "by='words': expected one of 'positions', 'roles', 'components'", marks=ill_typed
        ),
        pytest.param({"grain": "words"}, "grain='words'", marks=ill_typed),
    ],
)
def test_questions_that_make_no_sense_are_refused(asked: dict, told: str) -> None:
    circuits = [made_up([(0, 0, (1,))])] * asked.pop("circuits", 2)
    with pytest.raises(InputError, match=told):
        compare_circuits(circuits, **asked)


def test_a_circuit_that_is_not_there_is_an_error() -> None:
    found = compare_circuits([made_up([(0, 0, (1,))])] * 2)
    for which in ("C", 5, -1):
        with pytest.raises(InputError, match="'A', 'B'"):
            found.exclusive(which)


def test_it_is_saved_as_table_figure_and_page(tmp_path) -> None:
    _, circuits = traced("ioi", 1)
    found = compare_circuits(circuits[:2])
    found.save(tmp_path)
    data = json.loads((tmp_path / "comparison.json").read_text())
    assert len(data["items"]) == found.table.height
    assert data["shared"]["edge"] == found.shared.filter(kind="edge").height
    assert '"compare":true' in (tmp_path / "comparison.html").read_text()
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        compare_circuits([made_up([])] * 2).plot()
