"""Adapters that are not merged, and hooks that act like them: refused by name, never traced as if they were absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import headtrace
from headtrace.errors import IdentityError, UnsupportedModelError
from tests.tiny import prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]
PROJECTIONS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}


def adapted(name: str, *targets: str) -> Any:
    """A tiny model with LoRA on some of its projections, away from its first values, which change nothing."""
    torch.manual_seed(0)
    options = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=list(targets),
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
    )
    return get_peft_model(tiny_hf(name), options).eval()


@pytest.mark.ill_typed
@pytest.mark.parametrize(
    ("name", "target"), [(name, each) for name, found in PROJECTIONS.items() for each in found]
)
def test_an_adapter_that_is_not_merged_is_refused_by_name(name: str, target: str) -> None:
    model = adapted(name, target)
    for given in (model, model.base_model.model):
        with pytest.raises(UnsupportedModelError, match=r"is an adapter \(peft\..*merge_and_unload"):
            headtrace.load(given)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_merged_adapter_is_a_plain_model_with_the_same_outputs(name: str) -> None:
    model = adapted(name, *PROJECTIONS[name])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits
    merged = headtrace.load(model.merge_and_unload())
    recording = merged.record(IDS)
    recording.check()
    torch.testing.assert_close(recording.logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert merged.weights_sha256 != tiny_model(name).weights_sha256


def test_an_adapter_that_is_added_to_a_loaded_model_is_noticed() -> None:
    model = tiny_model("llama")
    model.record(IDS)
    model.hf.add_adapter(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    with pytest.raises(UnsupportedModelError, match="v_proj' is an adapter"):
        model.record(IDS)


def adds(weight: Tensor) -> Callable[..., Tensor]:
    """A hook that acts as an adapter does: ``W x + D x``."""
    return lambda module, args, output: output + args[0] @ weight.T


# With a bias in the norm, the adapter's share of it would be called a head's.
@pytest.mark.parametrize("name", ["phi", "opt", "llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_hook_on_values_stops_every_trace(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    answers = top_two(model, IDS)
    for path, module in model.hf.named_modules():
        if path.endswith("v_proj") and isinstance(module, nn.Linear):
            module.register_forward_hook(adds(0.2 * torch.randn_like(module.weight)))
    for paths in ("attention", "complete"):
        with pytest.raises(IdentityError, match=r"The values of layer \d+ are not what its weights read"):
            headtrace.Tracer(model).trace(IDS, *answers, paths=paths)
    with pytest.raises(IdentityError):
        model.record(IDS).check()


def test_a_hook_that_only_looks_changes_nothing() -> None:
    model, seen = tiny_model("phi"), list[Tensor]()
    expected = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    hooked = model.layers[1].self_attn.v_proj.register_forward_hook(lambda *each: seen.append(each[2]))
    assert headtrace.Tracer(model).trace(IDS, *top_two(model, IDS)) == expected
    assert seen
    hooked.remove()
