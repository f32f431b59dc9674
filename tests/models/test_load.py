"""Loading: every kind of source, and a clear error for everything that cannot be read."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import headtrace
from headtrace.errors import InputError, OutOfMemoryError, UnsupportedModelError
from tests.conftest import IOI
from tests.tiny import prompts, tiny_hf, tiny_model


def test_a_local_folder_without_tokenizer_works_with_token_ids(tmp_path) -> None:
    hf = tiny_hf("llama")
    hf.save_pretrained(tmp_path)
    model = headtrace.load(tmp_path)
    assert model.tokenizer is None
    assert torch.equal(model.record(prompts()[0]).logits, headtrace.load(hf).record(prompts()[0]).logits)
    assert model.weights_sha256 == headtrace.load(hf).weights_sha256
    with pytest.raises(InputError, match="without a tokenizer"):
        model.record("some text")


def test_float64_is_the_same_model_in_double_precision(tmp_path) -> None:
    tiny_hf("qwen3").save_pretrained(tmp_path)
    double = headtrace.load(tmp_path, dtype="float64")
    assert double.dtype == torch.float64
    assert double.weights_sha256 == headtrace.load(tmp_path).weights_sha256


def test_lower_precision_than_half_is_refused_with_a_reason() -> None:
    with pytest.raises(InputError, match="'bfloat16', 'float16', 'float32'"):
        headtrace.load("smollm2-135m", dtype="float8")
    with pytest.raises(InputError, match=r"float8_e4m3fn.*model\.float\(\)"):
        headtrace.load(tiny_hf("llama").to(torch.float8_e4m3fn))


def test_post_norm_opt_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="do_layer_norm_before"):
        headtrace.load(tiny_hf("opt", do_layer_norm_before=False))


def test_missing_and_damaged_files_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no folder or GGUF file './nowhere'"):
        headtrace.load("./nowhere")
    with pytest.raises(InputError, match=r"config\.json"):
        headtrace.load(tmp_path)
    with pytest.raises(InputError, match=r"no GGUF file"):
        headtrace.load("missing.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"broken\.gguf.*cannot be read"):
        headtrace.load(broken)
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read"):
        headtrace.load(tmp_path / "model")


def test_a_hub_name_without_hub_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"hub cannot be reached.*smollm2-135m"):
        headtrace.load("someone/some-model")


def test_a_misspelled_name_is_answered_with_the_one_that_is_meant() -> None:
    with pytest.raises(InputError, match="Did you mean 'smollm2-135m'"):
        headtrace.load("smolm2-135m")
    with pytest.raises(InputError) as unlike:
        headtrace.load("someone/some-model")
    assert "Did you mean" not in str(unlike.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([5, 61], "id 61.*0 to 60"),
        ([-1], "id -1"),
        ([5] * 65, "65 tokens.*context of 64"),
    ],
)
def test_bad_prompts_are_explained(given, message: str) -> None:
    model = tiny_model("gpt2")
    if given == "":
        model.tokenizer = object()
    with pytest.raises(InputError, match=message):
        model.record(given)


def test_a_prompt_too_large_for_memory_stops_before_the_run(monkeypatch) -> None:
    model = tiny_model("gpt2")
    monkeypatch.setattr("headtrace.models.record.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"11 tokens needs about .* 1 KB is available"):
        model.record(prompts()[0])


def test_import_and_help_do_not_load_torch() -> None:
    code = (
        "import sys, headtrace, headtrace.cli\n"
        "try: headtrace.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'polars', 'numpy', 'headtrace.circuits', "
        "'headtrace.cli.trace'}\n"
        "assert not heavy & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.smollm2
def test_smollm2_comes_from_the_installed_package_and_adds_up(smollm2) -> None:
    recording = smollm2.record([IOI, "The capital of France is"])
    assert recording.check().worst < 1e-4
    assert recording.top_answers(1)[0][0] == " Mary"
    single = smollm2.record(IOI)
    assert recording.tokens() == single.tokens()
    torch.testing.assert_close(recording[0].logits, single.logits, rtol=1e-4, atol=1e-3)


@pytest.mark.smollm2
def test_answers_must_be_one_token(smollm2) -> None:
    assert smollm2.token_id(" Mary") == 5099
    with pytest.raises(InputError, match=r"tokens for this model: 'X' \+"):
        smollm2.token_id("Xylophonist")


@pytest.mark.smollm2
def test_bos_can_be_forced_and_removed(smollm2) -> None:
    plain = smollm2.to_ids("Hello there")
    assert smollm2.to_ids("Hello there", bos=False) == plain
    assert smollm2.to_ids("Hello there", bos=True) == [smollm2.tokenizer.bos_token_id, *plain]


def test_a_failed_gguf_conversion_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "a.gguf"
    source.write_bytes(b"content")
    with pytest.raises(InputError, match="cannot be read"):
        headtrace.load(source)
    assert not list((tmp_path / "cache" / "gguf").glob("*"))


def test_a_loaded_module_is_taken_as_it_is_or_refused() -> None:
    hf = tiny_hf("llama")
    assert headtrace.load(hf, dtype="float32", device="cpu").hf is hf
    with pytest.raises(InputError, match=r"dtype='float64', but the model .* float32"):
        headtrace.load(hf, dtype="float64")
    with pytest.raises(InputError, match=r"device='meta', but the model .* on 'cpu'"):
        headtrace.load(hf, device="meta")
