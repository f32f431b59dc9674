"""Methods own their options and can come from outside; what is found does not depend on how it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headtrace
from headtrace.errors import HeadtraceError, InputError
from headtrace.tracing import METHODS, ACCpp, Firings, make_method
from headtrace.tracing.accpp import Ranking
from headtrace.tracing.components import Upstream
from headtrace.tracing.firing import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.readings import Composer
from tests.documented import run_page
from tests.tiny import NAMES, prompts, tiny_model, top_two

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-method.md"


@pytest.fixture
def outside(monkeypatch) -> None:
    """The method of the how-to, registered as it says."""
    monkeypatch.setattr(METHODS, "_known", dict(METHODS))
    run_page(HOW_TO)


@pytest.mark.usefixtures("outside")
def test_a_method_of_another_package_traces_saves_and_verifies(tmp_path) -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    circuit = headtrace.Tracer(model, method="loudest-mlp", least=0.5).trace(ids, *top_two(model, ids))
    assert {circuit.node(e.source).kind for e in circuit.edges if e.side != "root"} == {"mlp"}
    assert circuit.method.settings["least"] == 0.5
    circuit.save(tmp_path / "c.json")
    assert headtrace.load_circuit(tmp_path / "c.json").method.name == "loudest-mlp"
    assert headtrace.verify(circuit, model, edges="none").predictions == ()


def test_a_method_that_leaves_a_firing_out_is_named_and_does_not_hang() -> None:
    class Forgetful(ACCpp):
        name = "forgetful"

        def trace(self, recording, firings, composer):
            return super().trace(recording, firings, composer)[1:]

    model, ids = tiny_model("llama"), prompts()[0]
    with pytest.raises(HeadtraceError, match="'forgetful' gave nothing for L"):
        headtrace.Tracer(model, method=Forgetful()).trace(ids, *top_two(model, ids))


@pytest.mark.ill_typed
def test_options_belong_to_their_method() -> None:
    model = tiny_model("llama")
    assert headtrace.Tracer(model, method=ACCpp(tau=0.2)).method == make_method("acc++", tau=0.2)
    with pytest.raises(InputError, match="'acc' has no option 'ig_steps': it takes tau"):
        headtrace.Tracer(model, method="acc", ig_steps=3)
    with pytest.raises(InputError, match="has its options already"):
        headtrace.Tracer(model, method=ACCpp(), tau=0.2)
    with pytest.raises(InputError, match="channels='some'"):
        headtrace.Tracer(model, method="svt", channels="some")
    described = make_method("svt", channels="all").describe()
    assert (described.tau, described.ig_steps, described.settings) == (0.5, None, {"channels": "all"})
    assert make_method("acc++", tau=lambda keys: 0.1).describe().tau == "custom"


@pytest.mark.parametrize("name", NAMES)
def test_bounds_hold_and_the_largest_candidates_are_those_of_all(name: str) -> None:
    """Looking only at components whose bound reaches the k-th plain candidate misses none of the k largest."""
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts(3, (11, 9)))
    layer = 3
    places = [(p, headtrace.Site("head", layer, h, 8, s)) for p in (0, 1) for h in (0, 1, 3) for s in (6, 8)]
    firings = Firings.of(places, model.device)
    upstream = Upstream(recording, Composer(model), layer, 9)
    scores = FiringScores.of(recording, firings, 9, 64)
    active = torch.arange(len(firings))
    for side in (QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)):
        every = side.attributions()
        heads = every[:, side.index.n_non_head :].abs().amax(-1)
        assert bool((heads <= side.bounds() * (1 + 1e-12) + 1e-15).all())
        ranking = Ranking(side)
        for k in (1, 7, 40, 500, ranking.n_candidates):
            found = every.flatten(1).gather(1, ranking.largest(active, k))
            wanted = every.flatten(1).sort(dim=1, descending=True).values[:, :k]
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
        some = ranking.largest(active[1::3], 12)
        assert torch.equal(some, ranking.largest(active, 12)[1::3])
