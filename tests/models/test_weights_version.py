"""Weights that change after loading: everything that follows from them is made anew, and old recordings are refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import headtrace
from headtrace.channels import decompose, decompose_all
from headtrace.errors import InputError
from headtrace.models.integrity import Watcher
from tests.tiny import NAMES, prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]


def in_place(hf) -> None:
    with torch.no_grad():
        hf.model.layers[1].self_attn.q_proj.weight.mul_(2)


def one_number(hf) -> None:
    with torch.no_grad():
        hf.model.layers[1].self_attn.k_proj.weight[0, 0] += 1


def a_norm(hf) -> None:
    with torch.no_grad():
        hf.model.layers[2].input_layernorm.weight.mul_(1.5)


def in_inference_mode(hf) -> None:
    with torch.inference_mode():
        hf.model.layers[1].self_attn.q_proj.weight.mul_(2)


def through_data(hf) -> None:
    hf.model.layers[1].self_attn.q_proj.weight.data.mul_(2)


def one_head_through_data(hf) -> None:
    hf.model.layers[1].self_attn.q_proj.weight.data[8:16] = 0


def columns_through_data(hf) -> None:
    hf.model.layers[1].self_attn.o_proj.weight.data[:, 8:16] = 0


def through_numpy(hf) -> None:
    hf.model.layers[1].self_attn.q_proj.weight.detach().numpy()[:] *= 2


def other_data(hf) -> None:
    weight = hf.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data * 2


def other_parameter(hf) -> None:
    projection = hf.model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.detach() * 2)


def other_module(hf) -> None:
    layer = tiny_hf("llama", seed=5).model.layers[1]
    layer.self_attn.config = hf.config
    hf.model.layers[1] = layer


def state_dict(hf) -> None:
    hf.load_state_dict(tiny_hf("llama", seed=5).state_dict())


def assigned_state_dict(hf) -> None:
    hf.load_state_dict(tiny_hf("llama", seed=5).state_dict(), assign=True)


def an_optimiser(hf, **options) -> None:
    hf(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    torch.optim.Adam(hf.parameters(), lr=0.01, **options).step()


def a_fused_optimiser(hf) -> None:
    an_optimiser(hf, fused=True)


def to_double(hf) -> None:
    hf.double()


CHANGES = [
    in_place,
    one_number,
    a_norm,
    in_inference_mode,
    through_data,
    one_head_through_data,
    columns_through_data,
    through_numpy,
    other_data,
    other_parameter,
    other_module,
    state_dict,
    assigned_state_dict,
    an_optimiser,
    a_fused_optimiser,
    to_double,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_weights_is_seen_by_everything_that_follows_from_them(change) -> None:
    model = tiny_model("llama")
    tracer = headtrace.Tracer(model)
    answer, wrong = top_two(model, IDS)
    tracer.trace(IDS, answer, wrong)
    old = model.record(IDS)
    decompose(old, "L2H1:5:3")
    kept = (model.weights, model.channels, model.weights_sha256)
    change(model.hf)

    fresh = headtrace.load(model.hf)
    assert model.weights is not kept[0]
    assert torch.equal(model.weights.W_Q, fresh.weights.W_Q)
    assert torch.equal(model.weights.W_O, fresh.weights.W_O)
    assert torch.equal(model.channels.to_query, fresh.channels.to_query)
    assert model.weights_sha256 == fresh.weights_sha256
    assert (model.weights_sha256 == kept[2]) == (change is to_double)
    assert model.record(IDS).check().worst < 1e-4
    mine, its = (decompose(m.record(IDS), "L2H1:5:3") for m in (model, fresh))
    assert torch.equal(mine.terms, its.terms)
    circuits = [t.trace(IDS, answer, wrong) for t in (tracer, headtrace.Tracer(fresh))]
    assert circuits[0].edges == circuits[1].edges
    for use in (
        lambda: decompose(old, "L2H1:5:3"),
        lambda: decompose_all(old[0]),
        lambda: model.decompose(old, "L2H1:5:3"),
        old.check,
        lambda: tracer.trace_firings(old, ["L2H1:5:3"]),
        lambda: old.save("unwritten"),
    ):
        with pytest.raises(InputError, match=r"weights of .* were changed after this recording was made"):
            use()


@pytest.mark.parametrize("name", NAMES)
def test_looking_at_and_running_a_model_changes_nothing(name: str) -> None:
    model = tiny_model(name)
    before = model.refresh()
    recording = model.record(prompts())
    recording.check()
    headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    assert model.weights is model.weights
    assert model.refresh() is before
    assert recording[1].weights_version is before


def test_weights_that_become_not_finite_are_named_at_every_use_until_mended() -> None:
    model = tiny_model("llama")
    weight = model.hf.model.layers[1].self_attn.q_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    for _ in range(2):
        with pytest.raises(InputError, match=r"'model\.layers\.1\.self_attn\.q_proj\.weight' is not finite"):
            model.record(IDS)
    with torch.no_grad():
        weight.copy_(before)
    assert model.record(IDS).check().worst < 1e-4


def test_a_larger_vocabulary_is_seen() -> None:
    model = tiny_model("llama")
    model.hf.resize_token_embeddings(70, mean_resizing=False)
    assert model.d_vocab == 70
    assert model.record([65, 66]).logits.shape[-1] == 70


def test_layers_taken_away_are_refused_with_what_to_do() -> None:
    model = tiny_model("llama")
    del model.hf.model.layers[3]
    with pytest.raises(InputError, match=r"says 4 layers, and the model has 3.*num_hidden_layers"):
        model.record(IDS)


def test_an_edit_that_cannot_be_seen_needs_to_be_said() -> None:
    """What the documentation says of few numbers changed through ``.data``: when this fails, it should say more."""
    model = tiny_model("llama")
    weight = model.hf.model.layers[1].self_attn.q_proj.weight
    watcher, before = Watcher(model.hf), model.weights.W_Q.clone()
    places = [(row, column) for row in range(32) for column in range(32)]

    def unseen(place) -> bool:
        kept = float(weight.data[place])
        weight.data[place] = kept + 1
        same = watcher.unchanged()
        weight.data[place] = kept
        return same

    place = next(place for place in places if unseen(place))
    weight.data[place] += 1
    assert torch.equal(model.weights.W_Q, before)
    model.invalidate()
    assert torch.equal(model.weights.W_Q, headtrace.load(model.hf).weights.W_Q)


def test_models_loaded_for_inference_only_are_watched_too() -> None:
    with torch.inference_mode():
        model = headtrace.load("builtin")
        before = model.weights
        model.hf.transformer.h[0].attn.c_attn.weight.mul_(2)
        assert model.weights is not before
        assert model.record([1, 2, 3]).check().worst < 1e-4


def test_looking_costs_far_less_than_reading_all_weights() -> None:
    hf = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(75)])
    watcher = Watcher(hf)
    assert len(list(hf.parameters())) == 300
    assert sum(sample.size for sample in watcher._samples) < 0.1 * sum(p.numel() for p in hf.parameters())
    assert watcher.unchanged()


def test_while_assumed_unchanged_the_weights_are_looked_at_once(monkeypatch) -> None:
    model = tiny_model("llama")
    looks = []
    monkeypatch.setattr(Watcher, "unchanged", lambda self: looks.append(self) or True)
    with model.assume_weights_unchanged(), model.assume_weights_unchanged():
        for _ in range(5):
            model.weights  # noqa: B018
    assert len(looks) == 1
    model.weights  # noqa: B018
    assert len(looks) == 2


def test_old_recordings_do_not_keep_old_weights_in_memory() -> None:
    model = tiny_model("llama")
    recording = model.record(IDS)
    old = weakref.ref(model.hf.model.layers[1].mlp.up_proj.weight)
    other_parameter(model.hf)
    model.hf.load_state_dict(tiny_hf("llama", seed=5).state_dict(), assign=True)
    assert model.refresh() is not recording.weights_version
    gc.collect()
    assert old() is None


def test_the_hash_of_all_weights_is_as_it_was_first_defined() -> None:
    """Circuit files on people's disks carry it."""
    assert headtrace.load("builtin").weights_sha256 == (
        "5937545d0aa9a7909c6a2aaacd804a01f595b70d4f85f25033eafaaad0a24007"
    )
