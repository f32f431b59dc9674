"""Patterns that are computed again from queries and keys are those that would have been kept, and nothing is ever as
large as all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headtrace
from headtrace.causal import ComponentChange, rerun
from headtrace.errors import HeadtraceError, InputError
from headtrace.request import Paths
from headtrace.vocabulary import Site
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two


@pytest.fixture(autouse=True, params=["in steps", "at once"])
def few_rows_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens are attended to in several steps, or in one, and have several blocks of destinations."""
    if request.param == "in steps":
        monkeypatch.setattr("headtrace.models.attention.SCORES_AT_ONCE", 100)
    monkeypatch.setattr("headtrace.models.patterns.NUMBERS_AT_ONCE", 100)
    monkeypatch.setattr("headtrace.models.patterns.SINGLED", 2)
    for module in ("patterns", "record"):
        monkeypatch.setattr(f"headtrace.models.{module}.BLOCK", 4)


@pytest.mark.parametrize("name", NAMES)
def test_all_parts_of_recomputed_patterns_are_those_of_kept_ones(name: str) -> None:
    model = tiny_model(name)
    kept, again = (model.record(prompts(), patterns=how) for how in ("keep", "recompute"))
    assert "patterns" not in again.tensors
    size = max(float(kept.raw_logits(layer).abs().max()) for layer in range(model.n_layers))
    allowed = rounding(torch.float32, forward_terms(model), max(size, 1.0))

    def same(one: torch.Tensor, other: torch.Tensor) -> None:
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= allowed * max(1.0, float(other.abs().max()))

    real = torch.arange(11)[None] < torch.tensor(kept.lengths)[:, None]
    for layer in range(model.n_layers):
        same(again.pattern(layer) * real[:, None, :, None], kept.pattern(layer) * real[:, None, :, None])
        same(again.layer_writes(layer), kept.layer_writes(layer))
        onto = torch.randn(kept.queries[layer].shape)
        same(again.attention.turned(layer, onto), kept.attention.turned(layer, onto))
        same(again.attention.of_head(layer, 1)[0], kept.pattern(layer)[0, 1])
    prompt, token = torch.tensor([0, 1]), torch.tensor([10, 4])
    same(again.attention.rows(3, prompt, token, 7), kept.attention.rows(3, prompt, token, 7))
    same(again.attention.row(2, 0, 1, 9), kept.attention.row(2, 0, 1, 9))
    layers, heads, sources = torch.tensor([[0, 3, 3]]), torch.tensor([[1, 2, 2]]), torch.tensor([[5, 0, 2]])
    where = layers, torch.tensor([[0]]), heads, sources
    same(again.attention.columns(*where, 9), kept.attention.columns(*where, 9))
    same(again.attention.at(layers, 0, heads, 8, sources), kept.attention.at(layers, 0, heads, 8, sources))
    weight = torch.rand(2, 9)
    exact, bound = kept.attention.reach(3, 0, weight), again.attention.reach(3, 0, weight)
    assert bool((bound >= exact * (1 - allowed)).all()), "a bound"
    one = torch.nn.functional.one_hot(torch.tensor([8, 3]), 9).float()  # nothing is left for the blocks
    same(again.attention.reach(3, 0, one), kept.attention.reach(3, 0, one))


@pytest.mark.parametrize("name", NAMES)
def test_circuits_are_the_same_whether_patterns_are_kept_or_not(name: str) -> None:
    # In float64, where no choice between two candidates hangs on a rounding.
    model, ids = tiny_model(name, dtype=torch.float64), prompts()[0]
    answer, wrong = top_two(model, ids)
    for paths in ("attention", "complete"):
        kept, again = (
            headtrace.Tracer(model, patterns=how).trace(ids, answer=answer, wrong=wrong, paths=paths)
            for how in ("keep", "recompute")
        )
        assert kept.edges
        assert [(e.source, e.target, e.side) for e in kept.edges] == [
            (e.source, e.target, e.side) for e in again.edges
        ]
        for one, other in zip(kept.edges, again.edges, strict=True):
            assert math.isclose(one.weight, other.weight, rel_tol=1e-8, abs_tol=1e-10)


@pytest.mark.ill_typed
def test_patterns_are_kept_as_long_as_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert "patterns" in model.record(prompts()[0]).tensors
    monkeypatch.setattr("headtrace.models.record.PATTERNS_BYTES", 1000)
    recording = model.record(prompts()[0])
    assert "patterns" not in recording.tensors
    assert "patterns" in model.record(prompts()[0], keep=["patterns"]).tensors, "asked for by name"
    with pytest.raises(InputError, match=r"recording\.pattern\(layer\)"):
        recording.patterns  # noqa: B018
    with pytest.raises(InputError, match="'keep', 'recompute', 'auto'"):
        model.record(prompts()[0], patterns="some")  # type: ignore[arg-type]


def test_what_acts_on_whole_scores_is_refused_where_rows_are_shown() -> None:
    model = tiny_model("llama")
    recording = model.record(prompts()[0])
    change = ComponentChange(Site("head", 1, 2))
    with pytest.raises(HeadtraceError, match='patterns="keep"'):
        rerun(recording, [change], keep=("queries", "keys", "log_normalisers"))
    assert "patterns" in rerun(recording, [change]).tensors


class PairsOfTokens(TorchDispatchMode):
    """The largest tensor with two axes of tokens that any operation makes."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.numbers = length, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape.count(self.length) >= 2:
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("paths", ["attention", "complete"])
def test_no_tensor_has_all_patterns_or_candidates_and_two_token_axes(paths: Paths) -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    (ids,) = prompts(lengths=(37,))  # a size that no other axis has
    answer, wrong = top_two(model, ids)
    a_layer = model.n_heads * len(ids) ** 2
    largest: dict[str, int] = {}
    for how in ("keep", "recompute"):
        tracer = headtrace.Tracer(model, patterns=how)
        with PairsOfTokens(len(ids)) as seen:
            circuit = tracer.trace(ids, answer=answer, wrong=wrong, paths=paths)
        assert circuit.edges
        largest[how] = seen.numbers
    assert largest["recompute"] <= a_layer
    assert largest["keep"] == model.n_layers * a_layer, "the patterns themselves, and nothing with candidates"
