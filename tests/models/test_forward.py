"""One door into the model, one pass at a time: threads do not mix, and the model is left as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import headtrace
from headtrace.causal import verify
from headtrace.errors import HeadtraceError
from headtrace.models import Observer
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_hf, tiny_model, top_two

THREADS = 8


def state(hf) -> dict:
    """Everything about a model that a pass touches."""
    return {
        "attention": (hf.config._attn_implementation, hf.config.get_text_config()._attn_implementation),
        "experts": hf.config._experts_implementation,
        "training": [module.training for module in hf.modules()],
        "forwards": [module.__dict__.get("forward") for module in hf.modules()],
        "methods": [module.__dict__.get("_attn") for module in hf.modules()],
        "hooks": [
            (list(module._forward_hooks), list(module._forward_pre_hooks), list(module._backward_hooks))
            for module in hf.modules()
        ],
        "gradients": [parameter.requires_grad for parameter in hf.parameters()],
    }


def test_eight_threads_record_trace_and_intervene_as_one_does() -> None:
    model = headtrace.load(tiny_hf("qwen2"))
    before = state(model.hf)
    tracer = headtrace.Tracer(model)
    ids = prompts(3, (11, 7, 9, 8, 11, 10, 7, 9))
    pairs = [top_two(model, one) for one in ids]

    def work(i: int):
        recording = model.record(ids[i])
        circuit = tracer.trace(ids[i], *pairs[i])
        return recording, circuit, verify(circuit, model, edges="top:3", controls=1)

    alone = [work(i) for i in range(len(ids))]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(work, [i for _ in range(3) for i in range(len(ids))]))
    for place, (recording, circuit, report) in enumerate(together):
        mine, own_circuit, own_report = alone[place % len(ids)]
        for name, tensor in mine.tensors.items():
            size = float(tensor.abs().max())
            allowed = rounding(torch.float32, forward_terms(model), size)
            assert float((recording.tensors[name] - tensor).abs().max()) <= allowed, name
        assert {n.name for n in circuit.nodes} == {n.name for n in own_circuit.nodes}
        assert len(report.effects) == len(own_report.effects)
        assert report.max_prediction_error < 1e-5
    assert state(model.hf) == before


class Interrupts(Observer):
    """Stops in the middle of a layer, as Ctrl-C does."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _stop(self, place: str, layer: int) -> None:
        if place == self.place and layer == 2:
            raise KeyboardInterrupt

    def layer_input(self, layer, residual, rotary):
        self._stop("layer_input", layer)

    def see(self, call, pattern):
        self._stop("see", call.layer)

    def mlp_write(self, layer, write):
        self._stop("mlp_write", layer)

    def norm_input(self, place, layer, x, norm):
        self._stop("norm_input", layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", ["layer_input", "see", "mlp_write", "norm_input"])
def test_an_interrupted_pass_leaves_the_model_as_it_was(place: str, dtype: torch.dtype) -> None:
    hf = tiny_hf("gemma3_text", dtype=dtype)
    hf.model.layers[1].train()
    hf.set_attn_implementation("sdpa")
    model, before = headtrace.load(hf), state(hf)
    ids = torch.tensor([prompts()[0]])
    start = torch.zeros(1, 11, 32, dtype=dtype)
    with pytest.raises(KeyboardInterrupt):
        model.run(ids, Interrupts(place), layers=range(1, 4), residual=start)
    assert state(hf) == before
    model.record(prompts()[0]).check()  # and the lock is free
    assert state(hf) == before


@pytest.mark.parametrize("name", NAMES)
def test_every_use_leaves_every_architecture_as_it_was(name: str) -> None:
    model, ids = tiny_model(name), prompts()[0]
    before = state(model.hf)
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids))
    verify(circuit, model, edges="top:2", controls=1, reach="global")
    model.end_logits(prompts())
    assert state(model.hf) == before


def test_dropout_is_off_while_the_model_runs_and_on_again_afterwards() -> None:
    hf = tiny_hf("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = headtrace.load(hf).record(prompts()[0]).logits
    hf.train()
    model = headtrace.load(hf)
    allowed = rounding(torch.float32, forward_terms(model), float(expected.abs().max()))
    assert float((model.record(prompts()[0]).logits - expected).abs().max()) <= allowed
    assert all(module.training for module in hf.modules())


def test_a_pass_from_inside_a_pass_is_refused_and_does_not_hang() -> None:
    model = tiny_model("llama")

    class Again(Observer):
        def see(self, call, pattern):
            model.record(prompts()[0])

    with pytest.raises(HeadtraceError, match="already running in this thread"):
        model.run(torch.tensor([prompts()[0]]), Again())
    model.record(prompts()[0]).check()


def test_two_views_of_one_module_share_its_lock() -> None:
    hf = tiny_hf("llama")
    first, second = headtrace.load(hf), headtrace.load(hf)
    expected = first.record(prompts()[0]).logits

    def work(i: int):
        return (first, second)[i % 2].record(prompts()[0]).logits

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(64)):
            allowed = rounding(torch.float32, forward_terms(first), float(expected.abs().max()))
            assert float((found - expected).abs().max()) <= allowed


def test_an_observer_may_change_what_it_sees() -> None:
    """Each place that can act does: the residual that comes out is what was put in."""
    model, ids = tiny_model("opt"), torch.tensor([prompts()[0]])

    class Silence(Observer):
        def attention_write(self, layer, write):
            return torch.zeros_like(write)

        def mlp_write(self, layer, write):
            return torch.zeros_like(write)

        def final_input(self, residual):
            self.final = residual.clone()

    watch = Silence()
    model.run(ids, watch)
    assert torch.equal(watch.final, model.record(ids).residuals[0])


def test_weights_and_channels_are_made_once_however_many_threads_ask() -> None:
    model = tiny_model("llama")
    with ThreadPoolExecutor(THREADS) as pool:
        made = list(pool.map(lambda _: (id(model.weights), id(model.channels)), range(32)))
    assert len(set(made)) == 1


def test_the_lock_is_free_after_an_error_inside_the_model() -> None:
    model = tiny_model("llama")
    handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        model.record(prompts()[0])
    handle.remove()
    model.record(prompts()[0]).check()


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_with_gradients_gives_the_same_logits_and_leaves_the_model_as_it_was(name: str) -> None:
    model = tiny_model(name)
    ids = torch.tensor([prompts()[0]])
    next(iter(model.hf.parameters())).requires_grad_(False)
    before = state(model.hf)
    expected = model.run(ids)

    class Scaled(Observer):
        def __init__(self) -> None:
            self.factor = torch.ones((), requires_grad=True)

        def attention_write(self, layer, write):
            return self.factor * write

    scaled = Scaled()
    logits = model.run(ids, scaled, grad=True)
    assert state(model.hf) == before
    allowed = rounding(torch.float32, forward_terms(model), float(expected.abs().max()))
    assert float((logits.detach() - expected).abs().max()) <= allowed
    logits[0, -1].max().backward()
    assert scaled.factor.grad is not None
    assert all(parameter.grad is None for parameter in model.hf.parameters())
    assert not expected.requires_grad
    with pytest.raises(KeyboardInterrupt):
        model.run(ids, Interrupts("see"), grad=True)
    assert state(model.hf) == before


@pytest.mark.parametrize("name", NAMES)
def test_queries_or_keys_alone_can_read_another_residual(name: str) -> None:
    """Queries are those of a pass in which the whole layer reads it, keys and values the model's own; and reversed."""
    model = tiny_model(name, dtype=torch.float64)
    ids = torch.tensor(prompts(5)[:1])
    added = torch.randn(
        ids.shape[1], model.d_model, dtype=model.dtype, generator=torch.Generator().manual_seed(0)
    )

    class Watching(Observer):
        def see(self, call, pattern) -> None:
            if call.layer == 2:
                self.query, self.key, self.value, self.pattern = call.query, call.key, call.value, pattern

    class Everything(Watching):
        def layer_input(self, layer, residual, rotary):
            return residual + added if layer == 2 else None

    class Queries(Watching):
        def query_input(self, layer, residual):
            return residual + added if layer == 2 else None

    class Keys(Watching):
        def key_input(self, layer, residual):
            return residual + added if layer == 2 else None

    before = state(model.hf)
    own, all_of_it, queries, keys = (Watching(), Everything(), Queries(), Keys())
    for observer in (own, all_of_it, queries, keys):
        model.run(ids, observer)

    def apart(one: torch.Tensor, two: torch.Tensor) -> float:
        """In units of what rounding allows."""
        allowed = rounding(torch.float64, forward_terms(model), float(two.abs().max()))
        return float((one - two).abs().max()) / allowed

    assert apart(queries.query, all_of_it.query) <= 1
    assert apart(queries.key, own.key) <= 1
    assert apart(keys.key, all_of_it.key) <= 1
    assert apart(keys.query, own.query) <= 1
    assert apart(queries.value, own.value) <= 1
    assert apart(keys.value, own.value) <= 1
    assert apart(queries.pattern, own.pattern) > 1000
    assert apart(keys.pattern, own.pattern) > 1000
    assert state(model.hf) == before


def test_a_recording_shows_what_was_recorded_while_queries_read_something_else() -> None:
    """Norms that read the other residual are not taken for the model's own."""
    model = tiny_model("qwen3")
    ids = torch.tensor(prompts(5)[:1])
    seen: dict[str, list[torch.Tensor]] = {"own": [], "reread": []}

    class Norms(Observer):
        which = "own"

        def norm_input(self, place, layer, x, norm) -> None:
            seen[self.which].append(x.clone())

    class Reread(Norms):
        which = "reread"

        def query_input(self, layer, residual):
            return residual * 1.5

    model.run(ids, Norms())
    model.run(ids, Reread())
    assert len(seen["own"]) == len(seen["reread"])
    first, again = seen["own"][0], seen["reread"][0]
    allowed = rounding(torch.float32, forward_terms(model), float(first.abs().max()))
    assert float((first - again).abs().max()) <= allowed
