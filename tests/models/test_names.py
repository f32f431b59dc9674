"""Names of models and devices: what is understood, and a reason for everything that is not."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.cli import main
from headtrace.errors import InputError
from headtrace.models.devices import find_device, same_device
from headtrace.models.hub import find_source
from tests.tiny import tiny_hf

UNUSABLE = {
    "": "empty",
    "  ": "empty",
    "two words": "not the name of a model.*letters, digits",
    "a/b/c": "one '/'",
    "https://huggingface.co/openai-community/gpt2": "an address.*'openai-community/gpt2'",
    "https://someone@huggingface.co/openai-community/gpt2": "an address.*'openai-community/gpt2'",
    "x" * 300: "300 characters",
    "null\0character": "not the name of a model",
    "gpt2@": "without a revision",
    "builtin@step1": "built-in model has no versions",
    "missing.gguf@main": "no GGUF file",
    "~/surely-not-there": "no folder or GGUF file",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_names_that_are_none_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match=UNUSABLE[name]):
        headtrace.load(name)


@pytest.mark.parametrize(
    "name", ["", "two words", "a/b/c", "https://huggingface.co/gpt2", "x" * 300, "builtin@1"]
)
def test_the_command_line_ends_with_code_2_for_them(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["info", name])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.ill_typed
def test_what_is_no_name_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="got int"):
        headtrace.load(3)


def test_a_name_may_carry_its_revision() -> None:
    found = find_source("EleutherAI/pythia-160m@step1000")
    assert (found.place, found.revision) == ("EleutherAI/pythia-160m", "step1000")
    assert find_source("pythia-160m@step1000", "step1000").name == "pythia-160m"
    assert find_source("a/b@refs/pr/1").revision == "refs/pr/1"
    with pytest.raises(InputError, match="'step1000', and revision='step2' for another"):
        find_source("pythia-160m@step1000", "step2")


def test_a_revision_is_refused_where_it_would_be_ignored(tmp_path) -> None:
    hf = tiny_hf("llama")
    hf.save_pretrained(tmp_path / "at@home")
    assert headtrace.load(tmp_path / "at@home").revision is None
    for given in ("builtin", tmp_path / "at@home", str(tmp_path / "at@home"), hf):
        with pytest.raises(InputError, match="revision='step1' asks for a version on the Hugging Face hub"):
            headtrace.load(given, revision="step1")
    with pytest.raises(InputError, match="revision is empty"):
        headtrace.load("a/b", revision="")


def test_a_folder_may_be_called_like_a_gguf_file(tmp_path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        headtrace.load(_made(tmp_path / "empty.gguf"))
    tiny_hf("llama").save_pretrained(tmp_path / "model.gguf")
    assert headtrace.load(tmp_path / "model.gguf").n_layers == 4


def _made(folder):
    folder.mkdir()
    return folder


def test_a_file_of_another_kind_is_refused(tmp_path) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is a file, but not a GGUF file\. Give the folder"):
        headtrace.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("banana", "no device 'banana'"),
        ("", "no device ''"),
        ("meta", "shapes only"),
        ("cuda:99", "cannot be used"),
    ],
)
def test_devices_that_cannot_be_used_are_refused_before_anything_is_read(
    device: str, reason: str, capsys
) -> None:
    with pytest.raises(InputError, match=reason):
        headtrace.load("builtin", device=device)
    with pytest.raises(SystemExit) as ended:
        main(["record", "builtin", "-p", "When Mary", "--device", device])
    assert ended.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said(monkeypatch) -> None:
    for device in ("cuda", "mps"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used here"):
            find_device(device)
    with pytest.raises(InputError, match="no float64"):
        find_device("mps", torch.float64)


def test_a_kind_of_device_means_any_of_its_kind() -> None:
    assert same_device(torch.device("cuda"), torch.device("cuda:1"))
    assert not same_device(torch.device("cuda:0"), torch.device("cuda:1"))
    assert not same_device(torch.device("cuda"), torch.device("cpu"))
