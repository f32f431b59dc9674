"""Content and complete circuits: contributions add up, claims through MLPs come true, influence follows one rule."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.circuits.graph import node_influence
from headtrace.errors import IdentityError, InputError
from headtrace.models.frozen import CONTENT_FIELDS, FrozenMLP, Units
from headtrace.models.identities import tolerance_for
from headtrace.request import TraceRequest
from headtrace.tracing.attribute_root import Place, attribute_root, project_writes
from headtrace.tracing.content import Content, contributions_of_units
from headtrace.vocabulary import ROOT
from tests.tiny import NAMES, prompts, tiny_model, top_two

EVERY = pytest.mark.parametrize("name", NAMES)
PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Anna and Tom went to the store, Emma gave a drink to"


@pytest.fixture(scope="module")
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


def of_two(model: headtrace.Model) -> Content:
    questions = [
        TraceRequest.create(ids, answer=a, wrong=w).resolve(model)
        for ids in prompts()
        for a, w in [top_two(model, ids)]
    ]
    recording = model.record([q.ids for q in questions], keep=CONTENT_FIELDS)
    return Content.of(
        recording, [attribute_root(q.root, recording, i).parts for i, q in enumerate(questions)]
    )


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_enters_a_node_is_what_it_contributes(name: str, dtype: torch.dtype) -> None:
    """Conservation, for every MLP and every head component of two prompts."""
    model = tiny_model(name, dtype=dtype)
    content = of_two(model)
    for prompt, length in enumerate(content.recording.lengths):
        sites = [headtrace.vocabulary.Site("mlp", layer, dest=t) for layer in range(4) for t in range(length)]
        sites += [
            headtrace.vocabulary.Site("head", layer, head, d, s)
            for layer in range(1, 4)
            for head in range(4)
            for d in range(length)
            for s in range(d + 1)
        ]
        shares = project_writes(
            content.recording,
            [content.place(prompt, site) for site in sites],
            torch.stack([content.direction(prompt, site) for site in sites]),
        ).shares
        whole = torch.tensor([content.contribution(prompt, site) for site in sites], dtype=dtype)
        constant = content.constants([(prompt, site) for site in sites])
        size = shares.abs().sum(1).clamp_min(1e-3 * float(whole.abs().max()))
        assert float(((shares.sum(1) + constant - whole).abs() / size).max()) < tolerance_for(dtype)


@EVERY
def test_all_components_sum_to_the_root(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    content = of_two(model)
    for prompt, read in enumerate(content.reads):
        place = Place(prompt, read[0].point.position, read[0].point.layer)
        shares = project_writes(content.recording, [place], read[0].direction[None]).shares
        assert float(shares.sum()) == pytest.approx(content.contribution(prompt, ROOT), rel=1e-9, abs=1e-9)


@EVERY
@pytest.mark.parametrize("paths", ["content", "complete"])
def test_influence_in_the_file_is_what_the_weights_give(name: str, paths: str) -> None:
    model = tiny_model(name)
    tracer = headtrace.Tracer(model)
    for ids in prompts():
        answer, wrong = top_two(model, ids)
        circuit = tracer.trace(ids, answer=answer, wrong=wrong, paths=paths)
        computed = node_influence(circuit)
        for node in circuit.nodes:
            assert computed[node.id] == pytest.approx(node.influence, abs=1e-9)
        if paths == "content":
            assert {edge.side for edge in circuit.edges} <= {"root", "value", "input"}


@EVERY
@pytest.mark.parametrize("paths", ["content", "complete"])
def test_tokens_in_the_file_contribute_what_their_embeddings_do(name: str, paths: str) -> None:
    """Every token has its number, in a batch as well; an embedding in the graph has the same one."""
    model = tiny_model(name)
    asked = [{"tokens": ids, "answer": a, "wrong": w} for ids in prompts() for a, w in [top_two(model, ids)]]
    content = of_two(model)
    circuits = headtrace.Tracer(model).trace_batch(asked, paths=paths)
    for prompt, (circuit, ids) in enumerate(zip(circuits, prompts(), strict=True)):
        found = circuit.prompt.contributions
        if circuit.reason:
            continue
        assert found is not None
        assert len(found) == len(ids)
        whole = content.gradients.embedding()[prompt, : len(ids)]
        torch.testing.assert_close(torch.tensor(found), whole, rtol=1e-4, atol=1e-5)
        for node in circuit.nodes:
            if node.kind == "embedding":
                assert found[node.dest] == node.contribution


@EVERY
def test_edges_of_content_say_what_passes_in_the_unit_of_the_root(name: str) -> None:
    """Where a node is followed for its content alone, that is the weight."""
    model = tiny_model(name)
    for ids in prompts():
        answer, wrong = top_two(model, ids)
        circuit = headtrace.Tracer(model).trace(ids, answer=answer, wrong=wrong, paths="content")
        for edge in circuit.edges:
            if edge.side == "root":
                assert edge.contribution is None
            else:
                assert edge.contribution == pytest.approx(edge.weight, rel=1e-3, abs=1e-4)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.inference_mode()
def test_hidden_units_sum_to_what_their_mlp_contributes(name: str, dtype: torch.dtype) -> None:
    content = of_two(tiny_model(name, dtype=dtype))
    for prompt, length in enumerate(content.recording.lengths):
        sites = [headtrace.vocabulary.Site("mlp", layer, dest=t) for layer in range(4) for t in range(length)]
        found = contributions_of_units(content, prompt, sites)
        for site in sites:
            rows = (torch.tensor([prompt]), torch.tensor([site.dest]))
            direction = content.gradients.mlp[site.layer][rows]
            constant = FrozenMLP.of(content.recording, site.layer, rows).by_unit(direction).constant
            whole = content.contribution(prompt, site)
            size = max(
                float(found[site].abs().sum()), abs(whole), 1e-30
            )  # some lie behind what the root reads
            assert abs(float(found[site].sum() + constant) - whole) / size < tolerance_for(dtype)


def test_hidden_units_that_do_not_sum_to_the_mlp_stop_the_trace(
    builtin: headtrace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when gates were read from another place than the one that was recorded."""
    honest = FrozenMLP.by_unit

    def twice(self: FrozenMLP, g: torch.Tensor) -> Units:
        units = honest(self, g)
        return Units(2 * units.contributions, units.constant)

    monkeypatch.setattr(FrozenMLP, "by_unit", twice)
    with pytest.raises(IdentityError, match="hidden units of MLP"):
        headtrace.Tracer(builtin).trace(PROMPT, " Mary", " John", paths="content", neurons=2)


@EVERY
def test_neurons_are_listed_for_every_mlp_and_only_when_asked_for(name: str) -> None:
    model = tiny_model(name)
    answer, wrong = top_two(model, prompts()[0])
    tracer = headtrace.Tracer(model)
    plain = tracer.trace(prompts()[0], answer=answer, wrong=wrong, paths="complete")
    assert all(node.neurons is None for node in plain.nodes)
    circuit = tracer.trace(prompts()[0], answer=answer, wrong=wrong, paths="complete", neurons=3)
    for node in circuit.nodes:
        assert (node.neurons is not None) == (node.kind == "mlp")
        sizes = [abs(neuron.contribution) for neuron in node.neurons or ()]
        assert len(sizes) == (3 if node.kind == "mlp" else 0)
        assert sizes == sorted(sizes, reverse=True)


def test_a_batch_gives_the_circuits_of_its_prompts(builtin: headtrace.Model) -> None:
    tracer = headtrace.Tracer(builtin)
    texts = [PROMPT, "When Anna and Tom went to the park, Tom gave a ball to"]
    answers = [(" Mary", " John"), (" Anna", " Tom")]
    together = tracer.trace_batch(
        [{"text": t, "answer": a, "wrong": w} for t, (a, w) in zip(texts, answers, strict=True)],
        paths="complete",
    )
    for circuit, text, (answer, wrong) in zip(together, texts, answers, strict=True):
        alone = tracer.trace(text, answer, wrong, paths="complete")
        assert {n.site for n in circuit.nodes if n.influence > 0.05} == {
            n.site for n in alone.nodes if n.influence > 0.05
        }


def test_the_answers_own_token_is_in_its_circuit(builtin: headtrace.Model) -> None:
    circuit = headtrace.Tracer(builtin).trace(PROMPT, " Mary", " John", paths="complete")
    embeddings = [node for node in circuit.nodes if node.kind == "embedding"]
    strongest = max(embeddings, key=lambda node: node.contribution)
    assert circuit.token(strongest.dest).strip() == "Mary"


def test_what_opposes_the_root_is_there_and_passes_nothing_on(builtin: headtrace.Model) -> None:
    circuit = headtrace.Tracer(builtin).trace(PROMPT, " Mary", " John", paths="content")
    against = [edge for edge in circuit.edges if edge.weight < 0]
    assert against
    flows = circuit.flows()
    assert all(flows[edge] == 0 for edge in against)


def test_a_complete_circuit_contains_what_holds_up_signals_of_mlps(builtin: headtrace.Model) -> None:
    circuit = headtrace.Tracer(builtin).trace(PROMPT, " Mary", " John", paths="complete")
    passing = [edge for edge in circuit.edges if edge.through is not None]
    assert passing
    for edge in passing:
        into = {e.source for e in circuit.edges_into(edge.source)}
        assert set(edge.through) <= into
    # An MLP may hold a signal up by its bias, or by inputs that cancel: then more than half of it remains.
    assert sum(edge.left < 0.5 for edge in passing) > len(passing) / 2


def test_attention_stays_the_default(builtin: headtrace.Model) -> None:
    tracer = headtrace.Tracer(builtin)
    plain = tracer.trace(PROMPT, " Mary", " John")
    assert plain == tracer.trace(PROMPT, " Mary", " John", paths="attention")
    assert {edge.side for edge in plain.edges} == {"root", "query", "key"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"paths": "both"}, "choose 'attention', 'content', 'complete'", marks=pytest.mark.ill_typed
        ),
        ({"paths": "attention", "counterfactual": OTHER}, "goes with"),
        ({"paths": "attention", "neurons": 3}, 'paths="content" or "complete"'),
        ({"paths": "content", "neurons": -1}, "neurons=-1"),
        ({"paths": "content", "counterfactual": OTHER}, 'paths="difference"'),
        ({"paths": "content", "heads": ["L2H0"], "answer": None, "wrong": None}, "is not a direction"),
    ],
)
def test_bad_questions_say_what_to_do(builtin: headtrace.Model, options: dict, message: str) -> None:
    asked = {"answer": " Mary", "wrong": " John", **options}
    with pytest.raises(InputError, match=message):
        headtrace.Tracer(builtin).trace(PROMPT, **asked)


def test_heads_can_be_the_root_of_a_complete_circuit(builtin: headtrace.Model) -> None:
    circuit = headtrace.Tracer(builtin).trace(PROMPT, heads=["L2H0"], paths="complete")
    assert {"query", "key"} <= {edge.side for edge in circuit.edges}
    assert circuit.prompt.contributions is None  # attention has no contributions


def test_a_signal_that_no_influence_reaches_is_no_reason_to_go_on(builtin: headtrace.Model) -> None:
    """A head wanted for its content and for a signal of no influence: shares of nothing are not computed."""
    prompt = "Two friends, Robert and Tom, saw a blanket at the hotel. Robert sold it to"
    circuit = headtrace.Tracer(builtin).trace(prompt, " Tom", " Robert", paths="complete")
    assert circuit.heads()
    assert headtrace.verify(circuit, builtin, edges="none").verdict == "PASS"
