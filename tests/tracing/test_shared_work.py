"""What is shared to save work changes nothing: keys of unchanged tokens, pairs that are swept together."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

import headtrace
from headtrace.channels.svd import ModelChannels
from headtrace.mechanism.folding import fold_flows
from headtrace.models import recording as recording_module
from headtrace.models.forward import forward, forward_behind, forward_keeping
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.models.identities import tolerance_for
from headtrace.tracing import Tracer, difference, difference_circuit
from headtrace.tracing.attribute_root import Place, project_writes
from headtrace.tracing.measured_replacements import measure
from headtrace.tracing.mlp_causes import MlpReader, SingleRemovals, causes_alone
from headtrace.tracing.prompt_words import ReplacementSearch, ask
from headtrace.vocabulary import Site
from tests.tiny import NAMES, prompts, tiny_model, top_two

MARY = "When Mary and John went to the store, John gave a drink to"
OTHERS = (MARY.replace("Mary", "Tom"), MARY.replace("Mary", "Anna"), MARY.replace(", John", ", Mary"))


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.mark.parametrize("family", NAMES)
def test_tokens_behind_a_kept_beginning_have_the_logits_of_the_whole_prompt(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids = torch.tensor([list(next(iter(prompts())))])
    whole, kept = forward_keeping(model, ids)
    torch.testing.assert_close(whole, forward(model, ids))
    if kept is None:
        pytest.fail("every family that is tested hands out its keys")
    changed = ids.repeat(2, 1)
    start = ids.shape[1] // 2
    changed[1, start] = (changed[1, start] + 1) % model.d_vocab
    expected = forward(model, changed)[:, start:]
    found = forward_behind(model, kept, start, changed[:, start:])
    allowed = tolerance_for(torch.float64) * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)


def test_words_of_several_tokens_are_continued_behind_the_prompt_as_from_its_start() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids = list(next(iter(prompts())))
    asked = ask(model, ids)
    search = ReplacementSearch(model, asked, model.record([ids]), 0)
    rows = [[1, 2], [3, 4]]
    expected = model.end_logits([[*ids[:3], *row] for row in rows])
    allowed = tolerance_for(torch.float64) * float(expected.abs().max())
    torch.testing.assert_close(search._next(3, rows), expected, rtol=0, atol=allowed)


def test_every_change_is_measured_as_if_it_ran_alone(model: headtrace.Model) -> None:
    asked = ask(model, MARY)
    found = measure(model, asked, budget=40)
    answer, wrong = (model.token_id(name) for name in (" Mary", " John"))
    clean = model.record([asked.ids]).logits[0].log_softmax(-1)

    def likelihood(log_probs: torch.Tensor, ids: list[int]) -> float:
        return float(log_probs[:-1].gather(-1, torch.tensor(ids)[1:, None]).sum())

    for change in found.changes[::5]:
        logits = forward(model, torch.tensor([change.ids]))[0]
        assert change.value == pytest.approx(float(logits[-1, answer] - logits[-1, wrong]), abs=1e-4)
        natural = likelihood(logits.log_softmax(-1), list(change.ids)) - likelihood(clean, asked.ids)
        assert change.naturalness == pytest.approx(natural, abs=1e-3)


@pytest.mark.parametrize("family", NAMES)
def test_pairs_that_are_swept_together_have_the_flows_of_each_alone(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    first, *_ = prompts()
    ids = list(first)
    others = [[*ids[:-1], (ids[-1] + i) % model.d_vocab] for i in (1, 2)]
    answer, wrong = top_two(model, ids)
    tracer = Tracer(model)
    together = tracer.difference_flows(ids, answer, wrong, root="linear", counterfactual=others)
    for other, flow in zip(others, together, strict=True):
        (alone,) = tracer.difference_flows(ids, answer, wrong, root="linear", counterfactual=other)
        size = max(abs(alone.value), abs(alone.other_value), 1.0)
        sites = list(alone.candidates)
        assert flow.of(sites) == pytest.approx(alone.of(sites), abs=tolerance_for(torch.float64) * size)


def test_long_pairs_are_swept_one_by_one_with_the_same_circuit(
    model: headtrace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {
        "answer": " Mary",
        "wrong": " John",
        "paths": "difference",
        "counterfactual": OTHERS,
    }
    together = Tracer(model).trace(MARY, **how)
    monkeypatch.setattr(difference_circuit, "SWEPT_TOKENS", 1)
    apart = Tracer(model).trace(MARY, **how)
    assert [edge.source for edge in apart.edges] == [edge.source for edge in together.edges]
    assert [e.weight for e in apart.edges] == pytest.approx([e.weight for e in together.edges], abs=1e-4)


def test_a_batch_of_one_prompt_is_a_view(model: headtrace.Model) -> None:
    one = model.record([model.to_ids(MARY)])
    three = one.repeated(3)
    assert len(three) == 3
    assert torch.equal(three[2].residuals, one.residuals)
    assert three.residuals.data_ptr() == one.residuals.data_ptr()
    with pytest.raises(headtrace.errors.InputError, match="3 prompts"):
        three.repeated(2)


def test_a_recording_splits_into_the_recordings_of_its_prompts(model: headtrace.Model) -> None:
    batch = model.record([model.to_ids(text) for text in (MARY, *OTHERS)])
    first, rest = batch.split(1)
    assert (len(first), len(rest)) == (1, len(OTHERS))
    for part, place, number in ((first, 0, 0), (rest, 2, 3)):
        assert part[place].lengths == batch[number].lengths
        for name, tensor in part[place].tensors.items():
            assert torch.equal(tensor, batch[number].tensors[name]), name
        assert torch.equal(part[place].visible[0], batch[number].visible[0])


@pytest.mark.parametrize("family", NAMES)
def test_writes_of_many_components_are_those_of_each(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "WRITES_AT_ONCE", 2)
    recording = tiny_model(family, dtype=torch.float64).record([list(each) for each in prompts()][:2])
    sites = [Site("head", layer, head, 3, src) for layer in (0, 1) for head in (0, 1) for src in (0, 3)]
    sites += [Site("mlp", 1, dest=2), Site("embedding", dest=1), Site("head", 1, 0, 2, 1)]
    each = torch.stack([recording.write(site.component, 1, site.dest) for site in sites])
    torch.testing.assert_close(recording.writes(sites, 1), each)


def test_mlps_that_a_sweep_does_not_keep_are_folded_the_same(
    model: headtrace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"counterfactual": OTHERS}
    kept = Tracer(model).difference_flows(MARY, " Mary", " John", **how)
    monkeypatch.setattr(difference, "MLPS_KEPT", 0)
    made = Tracer(model).difference_flows(MARY, " Mary", " John", **how)
    assert len(kept[0].flow.kept_mlps) == model.n_layers
    assert not made[0].flow.kept_mlps
    one, two = fold_flows(kept), fold_flows(made)
    size = abs(one.whole)
    assert set(one.edges) == set(two.edges)
    for ends, folded in one.edges.items():
        assert two.edges[ends].flow == pytest.approx(folded.flow, abs=1e-4 * size)


def test_channels_are_made_without_the_lock_of_the_model(
    model: headtrace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that makes other channels meanwhile needs it, and holds what this one waits for."""
    model.invalidate()
    own, waited = ModelChannels.at, list[bool]()

    def at(self: ModelChannels, layer: Any, head: Any) -> Any:
        other = Thread(target=model.refresh, daemon=True)
        other.start()
        other.join(20)
        waited.append(other.is_alive())
        return own(self, layer, head)

    monkeypatch.setattr(ModelChannels, "at", at)
    Tracer(model).trace(MARY, " Mary", " John")
    assert waited
    assert not any(waited)


@pytest.mark.parametrize("family", NAMES)
@torch.inference_mode()
def test_writes_of_heads_that_are_kept_are_those_that_are_computed(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids = [5, 9, 11, 23, 40]
    kept, computed = (model.record(ids, keep=CONTENT_FIELDS) for _ in range(2))
    kept.keep_head_writes()
    assert kept.head_writes is not None
    assert computed.head_writes is None
    sites = [
        Site("head", layer, head, dest, src)
        for layer in range(model.n_layers)
        for head in range(model.n_heads)
        for dest in range(len(ids))
        for src in range(dest + 1)
    ]
    places = [Place(0, position, layer) for layer, position in ((1, 2), (2, 4), (4, 4))]
    directions = torch.randn(len(places), model.d_model, generator=torch.Generator().manual_seed(0)).double()
    for found, expected in (
        (kept.moved_norms, computed.moved_norms),
        (kept.writes(sites), computed.writes(sites)),
        (
            project_writes(kept, places, directions).shares,
            project_writes(computed, places, directions).shares,
        ),
    ):
        allowed = tolerance_for(torch.float64) * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=allowed)


@torch.inference_mode()
def test_writes_of_heads_are_kept_of_short_prompts_only(model: headtrace.Model) -> None:
    long = model.record([model.to_ids(MARY)] * 3)
    long.keep_head_writes()
    assert long.token_ids.numel() > model.d_head
    assert long.head_writes is None


@torch.inference_mode()
def test_causes_of_several_directions_of_one_mlp_are_those_of_each_alone(model: headtrace.Model) -> None:
    recording = model.record(MARY, keep=CONTENT_FIELDS)
    places = [Place(0, 14, 1, True), Place(0, 9, 1, True)]
    removals = SingleRemovals.of(recording, 1, places)
    generator = torch.Generator().manual_seed(0)
    rows, directions = [0, 1, 0], torch.randn(3, model.d_model, generator=generator)
    own = torch.stack([recording.mlp_writes[1, 0, places[row].position] for row in rows])
    directions = directions / (directions * own).sum(-1, keepdim=True)
    readers = [
        [MlpReader(Place(0, place.position, 2, True), torch.randn(model.d_model, generator=generator))]
        for place in places
    ]
    together = causes_alone(recording, removals, rows, directions, readers=readers)
    assert any(alone.causes for alone in together)
    for row, direction, found in zip(rows, directions, together, strict=True):
        (expected,) = causes_alone(
            recording, removals.at([row]), [0], direction[None], readers=[readers[row]]
        )
        assert found.not_opposing == expected.not_opposing
        assert [each.cause.site for each in found.causes] == [each.cause.site for each in expected.causes]
        for one, other in zip(found.causes, expected.causes, strict=True):
            assert one.cause.weight == pytest.approx(other.cause.weight, rel=1e-4)
            torch.testing.assert_close(one.direction, other.direction, rtol=1e-3, atol=1e-5)
