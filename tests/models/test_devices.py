"""What runs on GPUs runs on devices that are pretended (`tests.pretended`): two of them, like Apple's without float64.

They catch tensors that meet on different devices, float64 where there is none, and numbers that are carried to the host
one by one. Whether a real device computes well they cannot say: `headtrace.models.integrity` looks at that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from docs.studies.survey import survey

import headtrace
from headtrace.causal import intervene
from headtrace.errors import IdentityError
from headtrace.interpret.head_roles import HeadSums
from headtrace.interpret.scored_signals import ScoredSignal, score_blocks
from headtrace.interpret.writes import channel_directions, channel_reads
from headtrace.models import devices as places
from headtrace.models import integrity
from headtrace.models.forward import sample
from tests.pretended import KIND, Pretended, pretended_devices
from tests.rounding import forward_terms, rounding
from tests.tiny import prompts, tiny_hf, top_two

IDS = prompts()[0]
FIRST, SECOND = f"{KIND}:0", f"{KIND}:1"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Two devices, without float64."""
    monkeypatch.setattr(places, "WITHOUT_FLOAT64", {KIND})
    with pretended_devices(float64=False) as mode:
        yield mode


def spread(hf: Any, whole: headtrace.Model) -> headtrace.Model:
    """A copy with the embedding and the first half of the layers on one device, everything after them on another."""
    layers, n = whole.architecture.layers, whole.n_layers
    base = layers.rpartition(".")[0]
    places = {f"{layers}.{i}": SECOND if 2 * i >= n else FIRST for i in range(n)}
    for name, _ in hf.get_submodule(base).named_children():
        if f"{base}.{name}" != layers:
            places[f"{base}.{name}"] = SECOND if f"{base}.{name}" == whole.architecture.final_norm else FIRST
    tied = hf.config.tie_word_embeddings
    places |= {name: FIRST if tied else SECOND for name, _ in hf.named_children() if name not in base}
    return headtrace.load(dispatch_model(copy.deepcopy(hf), places, main_device=FIRST, force_hooks=True))


@pytest.mark.parametrize("family", ["gptj", "mixtral", "gemma2"])
def test_a_model_on_two_devices_without_float64_is_traced_and_verified(family: str, devices) -> None:
    hf = tiny_hf(family, **({"num_hidden_layers": 2} if family == "gemma2" else {}))
    hf.config._experts_implementation = (
        "eager"  # the others ask whether they are on a CPU, and err about it here
    )
    whole = headtrace.load(hf)
    model = spread(hf, whole)
    assert [str(model.device_of(layer)) for layer in (0, model.n_layers - 1)] == [FIRST, SECOND]
    recording = model.record(prompts())
    recording.check()
    assert {tensor.device for tensor in recording.tensors.values()} == {model.device} == {torch.device(FIRST)}
    allowed = rounding(torch.float32, forward_terms(model), 20.0)  # logits are below twenty
    assert torch.allclose(recording.logits.cpu(), whole.record(prompts()).logits, atol=allowed)

    answer, wrong = top_two(whole, IDS)
    firing = recording.strongest_firings()[-1][0]
    assert model.decompose(recording, firing).rotated(2).sparseness.device.type == "cpu"
    tracer = headtrace.Tracer(model)
    assert tracer.explain(IDS, firing=firing).found.sides
    circuit = tracer.trace(IDS, answer, wrong, paths="complete")
    assert headtrace.verify(circuit, model, edges="top:2").max_prediction_error < allowed
    inner = [edge for edge in circuit.edges if edge.side in ("query", "key")]
    for reach in ("local", "global"):
        intervene(circuit, model, inner[:2], reach=reach)


def test_what_else_is_computed_needs_no_float64_on_the_device(devices) -> None:
    hf = tiny_hf("qwen3", num_hidden_layers=2)
    whole = headtrace.load(hf)
    model = headtrace.load(copy.deepcopy(hf).to(FIRST))
    answer, wrong = top_two(whole, IDS)
    for method in ("acc", "svt"):
        circuit = headtrace.Tracer(model, method=method).trace(IDS, answer, wrong)
        headtrace.verify(circuit, model, edges="top:1")
    circuit = headtrace.Tracer(model).trace(IDS, answer, root="probability")
    headtrace.sufficiency(circuit, model, counterfactual=[*IDS[:-2], 5, 6])
    headtrace.find_sinks(model, prompts())
    recording = model.record(IDS, patterns="recompute")
    recording.check()


def test_what_is_counted_over_a_corpus_needs_no_float64_on_the_device(devices) -> None:
    hf = tiny_hf("gpt2", n_layer=2)
    found = []
    for model in (headtrace.load(copy.deepcopy(hf)), headtrace.load(copy.deepcopy(hf).to(FIRST))):
        recording, sums = model.record(IDS), HeadSums.empty(model)
        sums.add(recording)
        signal = ScoredSignal("L1H2:0+3", 1, 2, "channel", (0, 3))
        block = score_blocks(model, [signal], len(IDS))[0]
        directions = channel_directions(model, 1, [(0, 0), (2, 1)])
        drawn = sample(model, recording.token_ids[:, :4], 8, torch.Generator().manual_seed(0))
        counted = survey(model, prompts(), rotations=2)
        numbers = [*directions, block.scores(recording, 0), sums.sums, drawn.float()]
        found.append([*(each.cpu().double() for each in numbers), counted.frame["sparseness"].to_torch()])
        channel_reads(model, 1, [(0, 0)])
    for on_host, on_device in zip(*found, strict=True):
        size = max(1.0, float(on_host.abs().max()))
        assert (on_host - on_device).abs().max() <= rounding(torch.float32, forward_terms(model), size)


def test_a_float64_tensor_on_a_device_without_any_is_seen(devices) -> None:
    on_device = torch.ones(2, device=FIRST)
    with pytest.raises(TypeError, match="no float64"):
        on_device.double()
    with pytest.raises(RuntimeError, match="different devices"):
        on_device + torch.ones(2, device=SECOND)
    assert places.exact(on_device).device.type == "cpu"
    assert places.rounded(places.exact(on_device), like=on_device).device == on_device.device


# -- devices that compute wrongly -----------------------------------------------------------------------------


class Spoilt:
    """Some operations give a thousandth too much, from when it is switched on."""

    def __init__(self, *names: str, on: bool = True) -> None:
        self.names, self.on = names, on

    def __call__(self, operation: Any, found: Any) -> Any:
        if not self.on or operation.name().split(".")[0] not in self.names:
            return found
        if isinstance(found, tuple):  # values first, then indices or statistics
            return (found[0] * 1.001, *found[1:])
        return found.mul_(1.001) if operation.name().split(".")[0].endswith("_") else found * 1.001


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("aten::mm", "aten::addmm", "aten::bmm"), "matrix products"),
        (("aten::_softmax",), "softmax"),
        (("aten::logsumexp",), "log-sum-exp"),
        (("aten::native_layer_norm",), "layer norm"),
        (("aten::rsqrt",), "norms"),
        (("aten::sum",), "sums"),
        (("aten::cumsum",), "cumulative sums"),
        (("aten::silu",), "activations"),
        (("aten::exp",), "activations"),
        (("aten::cos",), "rotations"),
        (("aten::embedding",), "embeddings"),
        (("aten::gather",), "choosing by index"),
        (("aten::index_select",), "choosing by index"),
        (("aten::index_put_",), "writing by index"),
        (("aten::scatter_add_",), "writing by index"),
        (("aten::topk",), "sorting"),
        (("aten::where",), "conditions"),
    ],
)
def test_a_device_that_computes_wrongly_is_refused_by_name_when_a_model_is_loaded(
    names: tuple[str, ...], message: str
) -> None:
    integrity._first_wrong.cache_clear()
    with pretended_devices(spoilt=Spoilt(*names)):
        hf = tiny_hf("llama").to(SECOND)
        with pytest.raises(IdentityError, match=rf"device '{SECOND}' computes {message} wrongly in float32"):
            headtrace.load(hf)
    integrity._first_wrong.cache_clear()


def test_a_device_that_is_right_but_rounds_is_accepted_in_every_dtype() -> None:
    with pretended_devices():
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            integrity._first_wrong.cache_clear()
            integrity.check_devices(dtype, [torch.device(SECOND)])
    integrity._first_wrong.cache_clear()


def test_a_device_that_begins_to_compute_wrongly_is_named_by_the_identity_that_fails() -> None:
    spoilt = Spoilt("aten::mm", on=False)
    with pretended_devices(spoilt=spoilt):
        hf = tiny_hf("llama")
        model = spread(hf, headtrace.load(hf))
        model.record(IDS).check()
        spoilt.on = True
        recording = model.record(IDS)
        spoilt.on = False
        with pytest.raises(IdentityError, match=rf"layer \d.* computed on '{KIND}:\d'.*device='cpu'"):
            recording.check()


# -- waiting for a device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", ["attention", "complete"])
def test_a_trace_waits_for_the_device_by_layers_and_not_by_firings(paths: str, devices) -> None:
    hf = tiny_hf("llama")
    answer, wrong = top_two(headtrace.load(hf), IDS)
    model = headtrace.load(hf.to(FIRST))
    nodes, waited = list[int](), list[int]()
    for least in (0.2, 0.2, 0.005):  # the first one makes what is kept for later: channels, hashes
        devices.carried.clear()
        circuit = headtrace.Tracer(model, min_influence=least).trace(IDS, answer, wrong, paths=paths)
        nodes.append(sum(node.expanded for node in circuit.nodes))
        waited.append(devices.carried["to the host"])
    assert nodes[2] > 3 * nodes[1]
    assert waited[2] <= 48 * model.n_layers, waited  # as firings alone would be, one by one: several hundred
