"""Components that are removed one at a time from what an MLP reads: only such as it does read."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing.attribute_root import Place
from headtrace.tracing.mlp_causes import REMOVED_ALONE, SingleRemovals, causes_alone
from tests.tiny import NAMES, tiny_model, top_two


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_an_mlp_is_no_cause_of_what_it_writes(name: str) -> None:
    """At the first token an MLP reads fewer components than are removed: what it wrote itself is not one of them."""
    model = tiny_model(name)
    recording = model.record([5, 9, 11], keep=CONTENT_FIELDS)
    parallel = model.architecture.parallel(model.config)
    for layer in range(2):
        place = Place(0, 0, layer, not parallel)
        assert 1 + layer + place.attention_layers * model.n_heads < REMOVED_ALONE
        written = recording.mlp_writes[layer, 0, 0]
        (alone,) = causes_alone(
            recording,
            SingleRemovals.of(recording, layer, [place]),
            [0],
            (written / (written @ written))[None],
        )
        sites = [each.cause.site for each in alone.causes]
        assert all(site.kind != "mlp" or site.layer < layer for site in sites), sites


def test_a_complete_circuit_of_a_short_prompt_is_traced() -> None:
    for name in NAMES:
        model = tiny_model(name)
        ids = [5, 9, 11]
        answer, wrong = top_two(model, ids)
        circuit = headtrace.Tracer(model, min_influence=0.001).trace(ids, answer, wrong, paths="complete")
        assert circuit.edges, name
        for edge in circuit.edges:
            assert edge.source != edge.target
