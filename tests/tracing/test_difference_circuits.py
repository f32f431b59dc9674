"""Difference circuits: flows that add up, the mean over several prompts, prompts found by the model, bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import headtrace
from headtrace.circuits import Circuit
from headtrace.errors import InputError
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow

MARY = "When Mary and John went to the store, John gave a drink to"
FLIPPED = "When Mary and John went to the store, Mary gave a drink to"
OTHERS = "When Anna and Tom went to the store, Emma gave a drink to"


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def tracer(model: headtrace.Model) -> headtrace.Tracer:
    return headtrace.Tracer(model)


def trace(tracer: headtrace.Tracer, other: object = FLIPPED, **options: object) -> Circuit:
    options = {"answer": " Mary", "wrong": " John", **options}
    return tracer.trace(MARY, paths="difference", counterfactual=other, **options)


def everything(model: headtrace.Model) -> headtrace.Tracer:
    return headtrace.Tracer(model, max_firings=None, min_influence=0.0)


@pytest.fixture(scope="module")
def whole(model: headtrace.Model) -> Callable[..., Circuit]:
    """The circuit with nothing left out, compared with these prompts; each is traced once."""

    @cache
    def traced(*others: str, wrong: str | None = " John") -> Circuit:
        return trace(everything(model), others[0] if len(others) == 1 else [*others], wrong=wrong)

    return traced


@pytest.mark.parametrize(
    ("other", "wrong"),
    [([FLIPPED], None), ([FLIPPED, OTHERS], " John")],
    ids=["likelihood, one", "logits, several"],
)
def test_all_that_flows_into_a_node_is_its_flow(
    whole: Callable[..., Circuit], other: list[str], wrong: str | None
) -> None:
    """With nothing left out: at the root, at every MLP and head, and across the embeddings."""
    found = whole(*other, wrong=wrong)
    change = found.difference.change
    size = sum(abs(edge.weight) for edge in found.edges if edge.side == "root")
    assert sum(found.difference.tokens) == pytest.approx(change, abs=1e-4 * size)
    strong = [node for node in found.nodes if node.expanded and abs(node.flow) > 0.01 * abs(change)]
    assert len(strong) > 8
    for node in strong:
        entering = sum(edge.weight for edge in found.edges_into(node))
        assert entering == pytest.approx(node.flow, abs=2e-3 * size), node.name


def test_edges_are_those_of_the_flow_itself(tracer: headtrace.Tracer, model: headtrace.Model) -> None:
    """The products of the circuit against the shares that `DifferenceFlow.edges` sums up, channels included."""
    from headtrace.tracing.difference import DIFFERENCE_FIELDS, difference_flow

    found = trace(tracer, min_influence=None)
    runs = [model.record(text, keep=DIFFERENCE_FIELDS) for text in (MARY, FLIPPED)]
    flow = difference_flow(*runs, found.root)
    for node in found.nodes:
        if not node.expanded:
            continue
        own = {(edge.source, edge.side): edge.flow for edge in flow.edges(0, node.site)}
        for edge in found.edges_into(node):
            assert edge.weight == pytest.approx(own[found.node(edge.source).site, edge.side], abs=1e-4)
            if edge.logits is not None:
                assert edge.logits[0] - edge.logits[1] == pytest.approx(edge.weight, abs=1e-4)
        if node.kind == "head":
            assert node.moves + node.attends == pytest.approx(node.flow, abs=1e-5)


def test_channels_of_queries_and_keys_carry_the_edge(whole: Callable[..., Circuit]) -> None:
    found = whole(FLIPPED)
    signals = [edge for edge in found.edges if edge.side in ("query", "key") and abs(edge.weight) > 0.05]
    assert signals
    for edge in signals:
        assert len(edge.channels) == len(edge.flows) <= 8
        assert [abs(flow) for flow in edge.flows] == sorted((abs(flow) for flow in edge.flows), reverse=True)


def test_several_prompts_give_the_mean_of_their_flows(whole: Callable[..., Circuit]) -> None:
    both, one, two = whole(FLIPPED, OTHERS), whole(FLIPPED), whole(OTHERS)
    compared = 0
    for node in both.nodes[1:]:
        parts = [each._by_name.get(node.name) for each in (one, two)]
        if all(parts):
            compared += 1
            flows = [part.flow for part in parts]
            assert node.flow == pytest.approx(sum(flows) / 2, abs=1e-4)
            assert node.spread == pytest.approx((min(flows), max(flows)), abs=1e-4)
    assert compared > 100
    assert both.difference.other_value == pytest.approx(
        (one.difference.other_value + two.difference.other_value) / 2, abs=1e-4
    )


def test_prompts_that_nobody_wrote(tracer: headtrace.Tracer) -> None:
    """Without a counterfactual, and without an answer: the model finds all of them, and the circuit says which."""
    found = tracer.trace(MARY, paths="difference")
    assert found.root.question() == '"Mary" rather than "John"'
    assert found.difference.automatic
    assert all(each.flips for each in found.difference.prompts)
    assert any("'Mary' -> " in each.change for each in found.difference.prompts)
    assert found.prompt.importance[2] == max(x for x in found.prompt.importance if x is not None)
    again = tracer.trace(MARY, paths="difference", counterfactual="auto")
    assert again == found


def test_a_batch_gives_what_single_prompts_give(tracer: headtrace.Tracer) -> None:
    requests = [
        {"text": MARY, "answer": " Mary", "wrong": " John", "counterfactual": FLIPPED},
        {"text": OTHERS, "answer": " Anna", "wrong": " Tom", "counterfactual": [MARY, FLIPPED]},
    ]
    batch = tracer.trace_batch(requests, paths="difference")
    for request, found in zip(requests, batch, strict=True):
        alone = tracer.trace(request, paths="difference")
        assert [node.name for node in alone.nodes] == [node.name for node in found.nodes]
        for one, two in zip(alone.edges, found.edges, strict=True):
            assert one.weight == pytest.approx(two.weight, abs=1e-4)


def test_prompts_of_a_batch_may_bring_their_counterfactuals_or_not(tracer: headtrace.Tracer) -> None:
    """One each (a line of JSONL), or none: then it is found. Attention has no use for them."""
    asked = {"text": MARY, "answer": " Mary", "wrong": " John"}
    given, found = tracer.trace_batch([{**asked, "counterfactual": OTHERS}, asked], paths="difference")
    assert given == trace(tracer, OTHERS)
    assert found == trace(tracer, "auto")
    assert (given.difference.automatic, found.difference.automatic) == (False, True)
    assert tracer.trace({**asked, "counterfactual": OTHERS}) == tracer.trace(asked)


def test_the_file_says_what_was_compared(tracer: headtrace.Tracer, tmp_path: Path) -> None:
    found = trace(tracer, [FLIPPED, OTHERS])
    path = found.save(tmp_path / "c.json")
    assert headtrace.load_circuit(path) == found
    text = found.summary()
    for said in (FLIPPED, OTHERS, "moves something else", "attends differently", "of the difference"):
        assert said in text
    assert found.difference.other_value < 0
    assert f" - ({found.difference.other_value:.4g}) = " in text, "never two minus signs in a row"


def test_opposing_flow_is_marked(whole: Callable[..., Circuit]) -> None:
    found = whole(FLIPPED)
    assert any(edge.weight < 0 for edge in found.edges)
    assert "opposing" in found.summary()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt_neox", "gpt2"])
def test_families_without_a_tokenizer(name: str) -> None:
    """Norms behind attention, norms of queries, softcaps, parallel blocks: edges sum to flows."""
    model = tiny_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 2})
    found = everything(model).trace(
        [5, 9, 11, 9, 3, 8], answer=7, wrong=2, paths="difference", counterfactual=[5, 9, 12, 9, 3, 8]
    )
    assert found.difference.shown == pytest.approx(1, abs=1e-3)
    for node in found.nodes:
        if node.expanded:
            entering = [edge.weight for edge in found.edges_into(node)]
            size = max(sum(map(abs, entering)), abs(found.difference.change))
            assert sum(entering) == pytest.approx(node.flow, abs=1e-4 * size), node.name
    automatic = headtrace.Tracer(model).trace([5, 9, 11, 9, 3, 8], paths="difference")
    assert automatic.difference.automatic
    assert automatic.edges


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": "content", "counterfactual": FLIPPED}, 'goes with paths="difference"'),
        ({"paths": "complete", "counterfactual": FLIPPED}, 'goes with paths="difference"'),
        ({"counterfactual": FLIPPED}, 'goes with paths="difference"'),
        ({"paths": "difference", "counterfactual": MARY}, "is the prompt itself"),
        ({"paths": "difference", "counterfactual": "When Mary went"}, "tokens, the prompt 15.*auto"),
        ({"paths": "difference", "counterfactual": FLIPPED, "neurons": 3}, "neurons"),
    ],
)
def test_bad_input_gets_one_clear_line(
    tracer: headtrace.Tracer, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tracer.trace(MARY, answer=" Mary", wrong=" John", **options)


def test_a_change_without_effect_is_an_empty_circuit_with_the_reason(tracer: headtrace.Tracer) -> None:
    """A direction that is read before the tokens that differ cannot change."""
    vector = [1.0] * tracer.model.d_model
    found = tracer.trace(
        MARY, direction=vector, layer=1, position=3, paths="difference", counterfactual=FLIPPED
    )
    assert not found.edges
    assert "is the same on both prompts" in found.reason


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_tiny_budget_shows_what_flows_straight_into_the_root(model: headtrace.Model, most: int) -> None:
    """The strongest components are the words that differ, far below the root: with them alone there is no path."""
    found = trace(headtrace.Tracer(model, max_firings=most))
    assert found.reason is None
    assert 1 <= len(found.nodes) - 1 <= most
    assert any(edge.side == "root" for edge in found.edges)
    assert headtrace.verify(found, model, edges="none").verdict == "PASS"


def test_an_empty_circuit_names_the_setting_that_made_it_so(model: headtrace.Model) -> None:
    found = trace(headtrace.Tracer(model, min_influence=1.0, max_firings=1), [FLIPPED, OTHERS])
    assert not found.edges
    assert "carries 1 of the difference" in found.reason or "at least 1 of the difference" in found.reason
    assert "max_firings" not in found.reason


@pytest.mark.smollm2
def test_the_word_that_is_longer_is_named(smollm2: headtrace.Model) -> None:
    tracer = headtrace.Tracer(smollm2)
    with pytest.raises(InputError, match="'Eiffel' is 2 and 'Big' 1"):
        tracer.trace(
            "The Big Tower is in", answer=" the", paths="difference", counterfactual="The Eiffel Tower is in"
        )


@pytest.mark.smollm2
def test_the_noun_is_first_in_the_summary(smollm2: headtrace.Model) -> None:
    """The bars of a circuit are what was measured, and "The" has no part in what changed."""
    tracer = headtrace.Tracer(smollm2)
    found = tracer.trace("The keys to the cabinet", answer=" are", wrong=" is", paths="difference")
    lines = found.summary().splitlines()
    first = lines[1 + next(i for i, line in enumerate(lines) if line.startswith("What matters"))]
    assert '"keys"' in first.replace(" ", "").replace('""', '"') or '" keys"' in first
    assert found.difference.tokens[0] == 0, "it is the same in all prompts that are compared"
