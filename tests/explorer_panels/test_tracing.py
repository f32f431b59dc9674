"""Circuits that are shown while they grow, and traces that are ended from outside."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import headtrace
from headtrace.explorer.panels.circuits import trace
from headtrace.explorer.panels.requests import CircuitRequest, python_lines
from headtrace.request import TraceRequest
from tests.tiny import prompts, tiny_model, top_two

PATHS = ("attention", "content", "complete")


class CancelledError(Exception):
    pass


@pytest.fixture(scope="module")
def deep():
    """A model whose circuits have several waves."""
    model = tiny_model("llama")
    ids = prompts()[0]
    return headtrace.Tracer(model), ids, *top_two(model, ids)


@pytest.mark.parametrize("paths", PATHS)
def test_a_growing_circuit_only_gains_and_ends_as_the_whole(deep, paths) -> None:
    tracer, ids, answer, wrong = deep
    seen: list[headtrace.Circuit] = []
    whole = tracer.trace(ids, answer, wrong, paths=paths, on_partial=seen.append)
    assert whole == tracer.trace(ids, answer, wrong, paths=paths), "watching changes nothing"
    assert len(seen) >= 2

    def edges(circuit):
        return {(circuit.node(e.source).site, circuit.node(e.target).site, e.side) for e in circuit.edges}

    for before, after in zip(seen, [*seen[1:], whole], strict=True):
        assert edges(before) <= edges(after)
        assert {n.site for n in before.nodes if n.expanded} <= {n.site for n in after.nodes if n.expanded}
    assert edges(seen[0]) < edges(whole)
    assert not any(node.expanded for node in seen[0].nodes)
    assert edges(seen[-1]) == edges(whole)
    attended = {node.site: node.attention for node in whole.heads()}
    assert all(
        attended[n.site] == n.attention for circuit in seen for n in circuit.heads() if n.site in attended
    )


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("listener", ["progress", "on_partial"])
def test_what_a_listener_raises_ends_the_trace_and_leaves_the_model_as_it_was(deep, paths, listener) -> None:
    tracer, ids, answer, wrong = deep
    whole, calls, hf = tracer.trace(ids, answer, wrong, paths=paths), [], tracer.model.hf
    how = hf.config._attn_implementation
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules())

    def stop(*_) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise CancelledError

    with pytest.raises(CancelledError):
        tracer.trace(ids, answer, wrong, paths=paths, **{listener: stop})
    assert len(calls) == 2
    assert hf.config._attn_implementation == how
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules()) == hooks
    assert tracer.trace(ids, answer, wrong, paths=paths) == whole
    assert not getattr(tracer.model._thread, "assumed", False)


@pytest.mark.parametrize(
    "options",
    [
        {"paths": "attention"},
        {"paths": "complete"},
        {"paths": "attention", "method": "acc", "max_firings": 3},
        {"paths": "attention", "method_options": {"tau": 0.3}},
        {"paths": "complete", "min_influence": 0.1},
    ],
)
def test_the_python_lines_trace_the_same_circuit(session, recorded, root, run_lines, options) -> None:
    request = CircuitRequest(recording=recorded.id, **root, **options).trace_request(recorded.prompt)
    view, circuit = trace(session, request)
    assert run_lines(view.python)["circuit"] == circuit
    assert [node["name"] for node in view.circuit["nodes"]] == [node.name for node in circuit.nodes]


@pytest.mark.parametrize(
    "options", [{"method": "none"}, {"method_options": {"taw": 1}}, {"method_options": {"tau": 2}}]
)
def test_a_method_or_option_that_does_not_exist_is_refused_before_anything_runs(
    recorded, root, options
) -> None:
    with pytest.raises(ValidationError, match=r"none|taw|tau"):
        CircuitRequest(recording=recorded.id, **root, **options)


@pytest.mark.parametrize("budget", [None, 0, 10_001])
def test_a_trace_without_limit_is_refused(recorded, root, budget) -> None:
    with pytest.raises(ValidationError, match="max_firings"):
        CircuitRequest(recording=recorded.id, **root, max_firings=budget)


def test_answers_are_written_as_text_where_the_text_means_the_same(model, prompt) -> None:
    mary = model.token_id(" Mary", prompt=prompt.text)
    text, ids = prompt.text, model.to_ids(prompt.text)
    assert "answer=' Mary'" in python_lines(TraceRequest.create(text, answer=mary), model, "{request}")
    assert "answer=' Mary'" in python_lines(TraceRequest.create(ids, answer=" Mary"), model, "{request}")
    assert f"answer={mary}" in python_lines(TraceRequest.create(ids, answer=mary), model, "{request}")
