"""What heads say: through the unembedding, by channel, and against what the model says without them."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import InputError
from headtrace.interpret import check_head_says, head_says, output_channels
from tests.interpret.planted import any_texts
from tests.rounding import rounding
from tests.tiny import prompts, tiny_model
from tests.truth.blueprint import Features, Head, as_gpt2
from tests.truth.known import blueprint

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def copies():
    """L0H0 says the token before, L0H1 says against it."""
    f = Features(token=12, position=12, previous=12, answer=12)
    at = (f["position"][1:], f["position"][:-1])
    heads = {(0, 0): Head(*at, f["token"], f["answer"]), (0, 1): Head(*at, f["token"], -f["answer"])}
    return headtrace.load(as_gpt2(blueprint(f, 1, heads)))


def test_a_planted_head_raises_or_lowers_what_it_reads(copies) -> None:
    ids = any_texts(1)[0]
    recording = copies.record(ids)
    for src in (2, 5, 8):
        (read,) = copies.token_labels([ids[src]])
        assert head_says(recording, 0, 0, src).raises[0][0] == read
        assert head_says(recording, 0, 1, src).lowers[0][0] == read


def test_every_channel_of_a_copying_head_says_what_it_reads(copies) -> None:
    channels = output_channels(copies, 0, 0, channels=12, most=1)
    assert len(channels) == 12
    assert all(each.reads[0][0] == each.raises[0][0] for each in channels)
    against = output_channels(copies, 0, 1, channels=12, most=1)
    assert all(each.reads[0][0] == each.lowers[0][0] for each in against)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_channels_of_the_output_are_the_singular_values_of_the_product(name) -> None:
    model = tiny_model(name)
    weights = model.weights
    for layer, head in ((0, 0), (1, model.n_heads - 1)):
        whole = weights.W_V[layer, head // weights.group].double() @ weights.W_O[layer, head].double()
        expected = torch.linalg.svdvals(whole)[: model.d_head]
        channels = output_channels(model, layer, head, channels=model.d_head)
        found = torch.tensor([each.singular_value for each in channels], dtype=torch.float64)
        size = float(expected[0])
        assert float((found - expected).abs().max()) <= rounding(torch.float64, 8 * model.d_model, size)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_without_anything_in_between_the_prediction_is_the_change_of_the_logits(name) -> None:
    """What a head of the last layer writes, with the MLP's change taken out of the comparison by freezing the norm."""
    model = tiny_model(name)
    recording = model.record(prompts(lengths=(9,)))
    layer, head, dest, src = model.n_layers - 1, 1, 8, 3
    write = recording.bare_values[layer, head, 0, src].double() @ model.weights.W_O[layer, head].double()
    scale = float(recording.norm_scales[-1, 0, dest])
    attention = float(recording.patterns[layer, 0, head, dest, src])
    centred = model.architecture.centred(write) * model.weights.final_gain.double()
    logits = attention * (model.weights.W_U.double() @ centred) / scale
    says = head_says(recording, layer, head, src, most=model.d_output)
    predicted = {token: value * attention / scale for token, value in (*says.raises, *says.lowers)}
    labels = model.output_labels(range(model.d_output))
    moved = logits - logits.mean()
    error = max(
        abs(predicted[label] - float(moved[i])) for i, label in enumerate(labels) if labels.count(label) == 1
    )
    assert error <= rounding(torch.float32, 4 * model.d_model, float(logits.abs().max()))


def test_what_heads_say_is_borne_out_by_taking_it_away() -> None:
    """Strong movers of the last layer: their words hold, and those for another token that they could read do worse."""
    model = headtrace.load("builtin")
    recording = model.record(PROMPT)
    dest = recording.lengths[0] - 1
    found = []
    for head in range(model.n_heads):
        row = recording.patterns[2, 0, head, dest].clone()
        row[0] = 0
        if float(row.max()) > 0.3:
            found.append(check_head_says(recording, 2, head, dest, int(row.argmax())))
    assert found
    assert all(each.holds for each in found)
    assert all(each.auroc > each.control and each.correlation > 0.5 for each in found)


def test_places_that_are_not_there_are_refused() -> None:
    recording = headtrace.load("builtin").record(PROMPT)
    for ask in (
        lambda: head_says(recording, 9, 0, 1),
        lambda: head_says(recording, 0, 0, 99),
        lambda: output_channels(recording.model, 0, 99),
        lambda: check_head_says(recording, 2, 0, dest=3, src=5),
    ):
        with pytest.raises(InputError):
            ask()
