"""What compiled and planted models found wrong: one test for each mistake, which fails on the code before its mend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError
from headtrace.models import ARCHITECTURES
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing.attribute_root import above_cutoff
from tests.tiny import prompts, tiny_model, top_two
from tests.truth.compiled import (
    ABOUT,
    FOLDER,
    as_model,
    compiled_model,
    edges_by_reader,
    read_weights,
    rotated_weights,
    true_edges,
    weights,
)
from tests.truth.programs import questions
from tests.truth.scoring import found_edges


@pytest.mark.parametrize("wrong", [{"gain_offset": 1.0}, {"norm": "layer"}], ids=["gain_offset", "norm"])
def test_a_wrong_fact_about_norms_is_noticed_in_float64(wrong, monkeypatch) -> None:
    facts = dict(ARCHITECTURES)
    monkeypatch.setattr(ARCHITECTURES, "_known", {**facts, "llama": replace(facts["llama"], **wrong)})
    model = tiny_model("llama", dtype=torch.float64)
    with pytest.raises(IdentityError, match=r"norm=.*gain_offset="):
        model.record(prompts())


@pytest.mark.parametrize("program", ABOUT)
def test_sums_that_cancel_are_judged_by_what_was_added_up(program: str) -> None:
    model = compiled_model(program, rotated=True)
    model.record([question.ids for question in questions(program, 8, seed=20)]).check()


def test_a_final_state_that_no_token_reads_is_no_error() -> None:
    """An unembedding orthogonal to what the first position holds: its logits are rounding, and nothing else."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = prompts()[0]
    recording = model.record([ids])
    seen = recording.residuals[-1, 0, 0] * model.weights.final_gain
    weight = model.hf.get_output_embeddings().weight
    with torch.no_grad():
        weight -= torch.outer(weight @ seen / (seen @ seen), seen)
    model.record([ids]).check()


def test_attention_of_two_visible_keys_counts_below_one() -> None:
    method = headtrace.Tracer(tiny_model("llama", dtype=torch.float64)).method
    assert method.threshold(2) < 0.9999999
    assert [method.threshold(n) for n in (3, 5, 10)] == pytest.approx([2.5 / 3, 0.5, 0.25])


def test_firings_of_layer_0_have_causes() -> None:
    (ids, answer, wrong, _), *_ = questions("previous token", 1, seed=20)
    model = compiled_model("previous token")
    for paths in ("attention", "complete"):
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths=paths)
        sides = {edge.side for edge in circuit.edges if circuit.node(edge.target).layer == 0}
        assert sides >= {"query", "key"}


def test_rounding_at_the_kink_of_an_activation_does_not_decide_what_tokens_contribute() -> None:
    """Every hidden unit of an OPT moved to within rounding of zero, on one side and on the other."""
    model, ids = tiny_model("opt", dtype=torch.float64), prompts()[0]
    answer, wrong = top_two(model, ids)
    found = []
    for target in (-1e-13, 1e-13):
        for layer in range(model.n_layers):
            recording = model.record([ids], keep=CONTENT_FIELDS)
            fc1 = model.layers[layer].fc1
            with torch.no_grad():
                fc1.bias += target - fc1(recording.mlp_inputs[layer][0, -1])
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="content")
        assert circuit.prompt.contributions is not None
        found.append(circuit.prompt.contributions)
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_what_has_no_weight_is_no_seed() -> None:
    assert above_cutoff(torch.tensor([1.0, 0.0, 0.0, 0.0])) == [(0, 1.0)]
    model = compiled_model("previous token", rotated=True)
    for ids, answer, wrong, _ in questions("previous token", 4, seed=20):
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear")
        assert [edge.weight for edge in circuit.edges if edge.side == "root"] == pytest.approx(
            [1.0], abs=1e-3
        )


def test_what_biases_hold_is_shown_and_nothing_of_the_size_of_rounding_is_followed() -> None:
    """MLPs of an OPT that read nothing but rounding: all that they contribute comes from their own biases."""
    model, ids = tiny_model("opt", dtype=torch.float64), prompts()[0]
    with torch.no_grad():
        for layer in model.layers:
            layer.fc1.weight *= 1e-16
            layer.fc1.bias.fill_(1.0)
    answer, wrong = top_two(model, ids)
    for paths in ("content", "complete"):
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths=paths)
        mlps = [node for node in circuit.nodes if node.kind == "mlp" and node.expanded]
        assert mlps
        for mlp in mlps:
            (edge,) = circuit.edges_into(mlp)
            assert circuit.node(edge.source).kind == "offset"
            assert edge.contribution == pytest.approx(mlp.contribution, rel=1e-9)
        held = sum(circuit.flows()[edge] for mlp in mlps for edge in circuit.edges_into(mlp))
        assert held > 0.1
        assert circuit.influence_kept <= 1 - held + 1e-6


@pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])
@pytest.mark.parametrize("program", ["histogram", "duplicate", "sort", "token at count"])
def test_heads_that_drive_saturated_units_are_causes(program: str, rotated: bool) -> None:
    """Through frozen gates the counting head has no share: without it the MLP would say something else."""
    model = compiled_model(program, rotated=rotated)
    for ids, answer, wrong, _ in questions(program, 8, seed=20):
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="complete")
        counts, true, by_reader = (
            {edge for edge in edges if edge[2] == "input" and edge[0].kind == "head"}
            for edges in (
                found_edges(circuit, at=0.0),
                true_edges(weights(program), ids, answer, wrong),
                edges_by_reader(weights(program), ids, answer, wrong),
            )
        )
        assert true <= counts <= by_reader


def test_sources_that_a_head_attends_to_alike_are_explained_together() -> None:
    """No single source of a head that averages reaches the threshold."""
    model = compiled_model("fraction of previous")
    ids, answer, wrong, _ = questions("fraction of previous", 1, seed=20)[0]
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="complete")
    heads = circuit.heads()
    assert heads
    for node in heads:
        assert node.group is not None
        assert node.src in node.group
        assert node.attention < headtrace.Tracer(model).method.threshold(node.dest + 1)
        assert {edge.side for edge in circuit.edges_into(node)} >= {"query", "key"}
    assert headtrace.verify(circuit, model).verdict == "PASS"


def test_what_one_run_cannot_tell_is_said() -> None:
    """With a budget that ends the trace early, what holds a head down is named and not followed."""
    model, said = compiled_model("times behind"), list[str]()
    for ids, answer, wrong, _ in questions("times behind", 8, seed=20):
        circuit = headtrace.Tracer(model, max_firings=2).trace(
            ids, answer, wrong, root="linear", paths="complete"
        )
        assert all(sentence in circuit.summary() for sentence in circuit.not_told)
        said += circuit.not_told
    assert any("MLP 2" in sentence and "difference" in sentence for sentence in said)


def test_what_holds_a_head_down_is_its_cause_and_is_followed() -> None:
    """A head attends to the start token unless it finds others: what finds them takes attention away."""
    model = compiled_model("count of previous")
    ids, answer, wrong, _ = questions("count of previous", 1, seed=20)[0]
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="complete")
    held = [node for node in circuit.heads() if node.held_down_by]
    assert held
    for node in held:
        sources = {circuit.node(e.source).name for e in circuit.edges_into(node) if e.side != "value"}
        assert sources >= set(node.held_down_by or ())
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"


@pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])
def test_what_matters_by_not_writing_at_the_source_is_followed(rotated: bool) -> None:
    """An MLP marks tokens that have occurred before; what a head wrote at the start keeps it from marking that one."""
    w, (ids, answer, wrong) = read_weights(FOLDER / "rare_tokens.safetensors"), ([0, 1, 3, 2, 2, 1], 3, 2)
    model = as_model(rotated_weights(w) if rotated else w)
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="complete")
    found = set(found_edges(circuit, at=0.0))
    assert true_edges(w, ids, answer, wrong) <= found <= edges_by_reader(w, ids, answer, wrong)
    assert not circuit.not_told
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"


@pytest.mark.parametrize("program", ["count of previous", "induction"])
def test_verify_removes_channels_of_equal_singular_values_together_as_a_trace_does(program: str) -> None:
    """In random bases a signal lies in several channels of one singular value, each with an attribution of its own."""
    model = compiled_model(program, rotated=True)
    ids, answer, wrong, _ = questions(program, 3, seed=20)[2]
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="complete")
    assert any(node.equal_channels for node in circuit.heads())
    assert headtrace.verify(circuit, model, edges="none").verdict == "PASS"


# -- token and position ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [False, True], ids=["axes", "rotated"])
@pytest.mark.parametrize(("program", "kind"), [("previous token", "position"), ("histogram", "embedding")])
def test_heads_of_layer_0_read_the_token_or_its_position(program: str, kind: str, rotated: bool) -> None:
    """A previous-token head attends by position, one that counts equal tokens by the token; both move the token."""
    model = compiled_model(program, rotated=rotated)
    ids, answer, wrong, _ = questions(program, 1, seed=20)[0]
    tracer = headtrace.Tracer(model)
    circuit = tracer.trace(ids, answer, wrong, root="linear", paths="complete")
    of_side = {
        side: {circuit.node(e.source).kind for e in circuit.edges if e.side == side}
        for side in ("query", "key", "value")
    }
    assert of_side == {"query": {kind}, "key": {kind}, "value": {"embedding"}}
    for node in circuit.heads():
        why = tracer.explain(ids, node.site.firing)
        assert {cause.site.kind for side in why.found.sides.values() for cause in side.causes[:1]} <= {kind}
    assert headtrace.verify(circuit, model).verdict == "PASS"
