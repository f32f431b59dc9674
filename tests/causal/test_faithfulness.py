"""Keeping only the circuit: the masks do what they say, and the ends of the curve are what they must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headtrace.causal import FixedValues, Intervention, Patch, run
from headtrace.causal.faithfulness import faithfulness
from headtrace.causal.metric import metric_of
from headtrace.causal.patching import NEAREST, drawn_like, random_like
from headtrace.circuits import Node
from headtrace.errors import InputError
from headtrace.roots import Direction
from headtrace.vocabulary import Component, Site
from tests.causal.traced import traced
from tests.tiny import prompts


def opened(name: str):
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    return model, circuit, recording, metric_of(circuit.root, recording)


def metric_with(recording, metric, ablation: str, *sites: Site, all_but=()) -> float:
    """The metric with some components replaced by their mean or by zero."""
    patch = Patch(FixedValues.of(recording, ablation), sites, all_but=all_but)
    return float(run(recording, [Intervention((patch,))], metric).metric[0])


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("ablation", ["zero", "mean"])
def test_keeping_everything_is_the_model(name: str, ablation: str) -> None:
    _, _, recording, metric = opened(name)
    model = recording.model
    every = [Site("head", layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    every += [Site("mlp", layer) for layer in range(model.n_layers)]
    kept = metric_with(recording, metric, ablation, *every, all_but=("head", "mlp"))
    assert kept == pytest.approx(metric.of(recording), abs=1e-9)


def test_dropping_one_component_takes_its_write_away() -> None:
    """In a parallel last layer nothing else reads the head: the final residual lacks the component's write alone."""
    model, _, recording, metric = opened("gpt_neox")
    layer, end = model.n_layers - 1, recording.lengths[0] - 1
    head, src = divmod(int(recording.patterns[layer, 0, :, end].argmax()), recording.lengths[0])
    found = metric_with(recording, metric, "zero", Site("head", layer, head, end, src))
    left = recording.residuals[-1, 0, end] - recording.write(Component("head", layer, head, src))[end]
    hf = model.hf
    with torch.inference_mode():
        logits = hf.get_output_embeddings()(hf.get_submodule(model.architecture.final_norm)(left))
    wanted = metric.of_logits(logits[None])
    assert found == pytest.approx(float(wanted), abs=1e-9)
    assert abs(found - metric.of(recording)) > 1e-4


def test_mean_ablation_puts_the_mean_value_in_place() -> None:
    model, _, recording, metric = opened("gpt_neox")
    layer, head, src, end = model.n_layers - 1, 1, 4, recording.lengths[0] - 1
    found = metric_with(recording, metric, "mean", Site("head", layer, head, end, src))
    values = recording.values[layer, 0, head]
    moved = recording.patterns[layer, 0, head, end, src] * (values.mean(0) - values[src])
    left = recording.residuals[-1, 0, end] + moved @ model.weights.W_O[layer, head]
    hf = model.hf
    with torch.inference_mode():
        logits = hf.get_output_embeddings()(hf.get_submodule(model.architecture.final_norm)(left))
    wanted = metric.of_logits(logits[None])
    assert found == pytest.approx(float(wanted), abs=1e-9)


def test_means_are_over_positions_or_over_reference_prompts_without_padding() -> None:
    model, _, recording, _ = opened("llama")
    bias = model.weights.b_V
    own = FixedValues.of(recording, "mean").vectors
    # Heads 2 and 3 share the second value.
    torch.testing.assert_close(own[2, 3] + bias[2, 1], recording.values[2, 0, 1].mean(0))
    both = model.record(prompts(5, (11, 7)))
    theirs = FixedValues.of(both, "mean").vectors
    rows = torch.cat((both.values[1, 0, 0], both.values[1, 1, 0, :7]))
    torch.testing.assert_close(theirs[1, 1] + bias[1, 0], rows.mean(0))


def test_a_circuit_of_everything_is_wholly_faithful() -> None:
    model, circuit, recording, _ = opened("llama")
    places = [
        (layer, head, dest, src)
        for layer in range(model.n_layers)
        for head in range(model.n_heads)
        for dest, src in recording.visible[layer][0].nonzero().tolist()
    ]
    known = {(n.layer, n.head, n.dest, n.src) for n in circuit.heads()}
    start = 1 + max(n.id for n in circuit.nodes)
    more = [Node(start + i, "head", *place) for i, place in enumerate(places) if place not in known]
    # The curve of a thousand firings is not the point: whole heads are as good and few.
    found = faithfulness(
        replace(circuit, nodes=circuit.nodes + tuple(more[:40])), model, unit="component", controls=0
    )
    assert found.kept == len(known) + 40 <= found.total == len(places)
    heads = [
        Node(start + i, "head", i // model.n_heads, i % model.n_heads, 0, 0)
        for i in range(model.n_layers * 4)
    ]
    whole = faithfulness(
        replace(circuit, nodes=(circuit.nodes[0], *heads), edges=()), model, unit="head", controls=0
    )
    assert whole.kept == whole.total
    assert whole.faithfulness == pytest.approx(1, abs=1e-9)
    assert whole.without == pytest.approx(whole.empty, abs=1e-9)


@pytest.mark.parametrize("ablation", ["zero", "mean"])
def test_the_curve_goes_from_nothing_to_the_circuit(ablation: str, tmp_path) -> None:
    model, circuit, *_ = opened("qwen2")
    found = faithfulness(circuit, model, ablation=ablation, controls=2)
    assert found.full == pytest.approx(circuit.root.value, abs=1e-9)
    assert found.curve["firings"].to_list() == list(range(len(circuit.heads()) + 1))
    assert found.curve["kept"].to_list() == found.curve["firings"].to_list()
    assert found.curve["faithfulness"][0] == found.curve["random"][0] == 0
    assert found.curve["metric"][-1] == found.circuit
    assert found.faithfulness == pytest.approx((found.circuit - found.empty) / (found.full - found.empty))
    assert "all MLPs kept" in found.summary()
    found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_matched_controls_lie_outside_the_circuit_and_carry_as_much_attention() -> None:
    model, circuit, recording, _ = opened("qwen2")
    firings = [node.site for node in circuit.heads()]
    drawn = drawn_like(recording, firings, torch.Generator().manual_seed(0), NEAREST)
    places = [(n.layer, n.head, n.dest, n.src) for n in drawn]
    assert [n.layer for n in drawn] == [n.layer for n in firings]
    assert len(set(places)) == len(places)
    assert not set(places) & {(n.layer, n.head, n.dest, n.src) for n in firings}
    attention = recording.patterns[:, 0]
    gaps = [
        abs(float(attention[a.layer, a.head, a.dest, a.src] - attention[b.layer, b.head, b.dest, b.src]))
        for a, b in zip(firings, drawn, strict=True)
    ]
    any_places = [random_like(recording, n, torch.Generator().manual_seed(1)) for n in firings]
    far = [
        abs(float(attention[a.layer, a.head, a.dest, a.src] - attention[b.layer, b.head, b.dest, b.src]))
        for a, b in zip(firings, any_places, strict=True)
    ]
    assert sum(gaps) < sum(far)
    found = faithfulness(circuit, model, controls=2)
    assert found.without_matched is not None
    assert f"with as much attention: {found.without_matched:.3f}" in found.summary()
    assert faithfulness(circuit, model, controls=0).without_random is None


@pytest.mark.ill_typed
def test_larger_units_keep_more_and_mlps_can_be_ablated_too() -> None:
    model, circuit, recording, _ = opened("qwen2")
    kept = [
        faithfulness(circuit, model, unit=unit, controls=0).kept for unit in ("component", "position", "head")
    ]
    assert kept[0] < kept[1] < kept[2]
    ablated = faithfulness(circuit, model, mlps="ablate", controls=0)
    assert ablated.empty != pytest.approx(faithfulness(circuit, model, controls=0).empty, abs=1e-6)
    with pytest.raises(InputError, match="'position'"):
        faithfulness(circuit, model, unit="layer")
    with pytest.raises(InputError, match="direction"):
        faithfulness(replace(circuit, root=Direction(layer=2)), model)
    assert recording.lengths[0] == 11
