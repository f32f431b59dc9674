"""A model that others use while headtrace uses it: their passes are what they would be alone, and so are ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

import headtrace
from headtrace.models import forward as passes
from tests.models.test_forward import state
from tests.rounding import forward_terms, rounding
from tests.tiny import prompts, tiny_hf, top_two

IDS = prompts()[0]
OTHERS = torch.tensor([prompts(5, (9,))[0]])


class Meanwhile:
    """Another thread that calls a function again and again; what it returned, and what went wrong."""

    def __init__(self, act: Callable[[], Tensor]) -> None:
        self.act, self.found, self.error, self._end = act, list[Tensor](), None, Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self.found.append(self.act())
        except Exception as error:  # shown by the test
            self.error = error

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


# GPT-Neo, GPT-J and Falcon attend by themselves; Mixtral has experts, Gemma-2 windows and a softcap.
# SDPA has no softcap.
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "eager") for name in ("llama", "gpt2", "gemma2", "mixtral", "gptj", "gpt_neo", "falcon")]
    + [(name, "sdpa") for name in ("llama", "gpt2", "falcon")],
)
def test_passes_of_another_thread_are_its_own_while_we_trace_and_verify(
    name: str, implementation: str
) -> None:
    hf = tiny_hf(name)
    model = headtrace.load(hf)
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    hf.config._attn_implementation = implementation
    before = state(hf)

    def own() -> Tensor:
        with torch.no_grad():
            return hf(input_ids=OTHERS).logits

    expected = own()
    with Meanwhile(own) as other:
        while len(other.found) < 40 and other.error is None:
            again = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
            report = headtrace.verify(circuit, model, edges="top:2", controls=1)
            assert {node.name for node in again.nodes} == {node.name for node in circuit.nodes}
            assert report.verdict == "PASS"
    assert other.error is None
    allowed = rounding(torch.float32, forward_terms(model), float(expected.abs().max()))
    for logits in other.found:
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) <= allowed
    assert state(hf) == before


def test_generate_in_another_thread_gives_the_same_tokens() -> None:
    hf = tiny_hf("llama")
    model = headtrace.load(hf)

    def own() -> Tensor:
        return hf.generate(OTHERS, max_new_tokens=6, do_sample=False, pad_token_id=0)

    expected, circuit = own(), headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    with Meanwhile(own) as other:
        while len(other.found) < 20 and other.error is None:
            assert headtrace.verify(circuit, model, edges="top:2", controls=1).verdict == "PASS"
    assert other.error is None
    assert all(torch.equal(tokens, expected) for tokens in other.found)


class _InsideALayer(passes.Observer):
    """Stops in the middle of a pass, so that another one runs at that very moment."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def layer_input(self, layer: int, residual: Tensor, rotary: object) -> None:
        if layer == 1:
            other = Thread(target=self.act)
            other.start()
            other.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gpt_neo", "gpt2"])
def test_in_the_middle_of_a_partial_pass_others_see_the_whole_model(name: str, dtype: torch.dtype) -> None:
    hf = tiny_hf(name, dtype=dtype)
    model, found = headtrace.load(hf), list[object]()
    with torch.no_grad():
        expected = hf(input_ids=OTHERS).logits

    def act() -> None:
        with torch.no_grad():
            found.extend((hf(input_ids=OTHERS), hf.config._attn_implementation, copy.deepcopy(hf.config)))

    ids, kind = torch.tensor([IDS]), type(hf.config)
    model.run(
        ids,
        _InsideALayer(act),
        layers=range(1, 2),
        residual=model.record(IDS).residuals[1],
        keep=ids[:, :1] * 0,
    )
    output, implementation, config = found
    # A float64 model's norms round to float32 by themselves, alike in both passes.
    allowed = rounding(torch.float32, forward_terms(model), float(expected.abs().max()))
    assert float((output.logits - expected).abs().max()) <= allowed
    assert (implementation, type(config), type(hf.config)) == ("eager", kind, kind)


def test_two_models_with_one_config_run_at_once() -> None:
    hf = tiny_hf("llama")
    twin = type(hf)(hf.config)
    twin.load_state_dict(hf.state_dict())
    kind = type(hf.config)
    model, second = headtrace.load(hf), headtrace.load(twin.eval())
    expected = model.record(IDS).logits
    with Meanwhile(lambda: second.record(IDS).logits) as other:
        while len(other.found) < 20 and other.error is None:
            assert torch.allclose(model.record(IDS).logits, expected, atol=1e-5)
    assert other.error is None
    assert all(torch.allclose(logits, expected, atol=1e-5) for logits in other.found)
    assert (type(hf.config), hf.config._attn_implementation) == (kind, "eager")
