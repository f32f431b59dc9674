"""The command line end to end: what a user sees, and exit code 2 with one clear message on bad input."""

from __future__ import annotations

import json
import subprocess

import pytest
import typer
from typer.testing import CliRunner

from headtrace.cli import app
from headtrace.cli import models as shown
from tests.starting import Started, command
from tests.tiny import tiny_hf, tiny_model


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command line in this process, which has torch already."""
    done = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_hf("gemma2").save_pretrained(path)
    return str(path)


def test_models_lists_architectures_and_aliases() -> None:
    done = run("models")
    assert done.returncode == 0
    for word in ("Gemma-2", "gpt2-small", "pythia-160m", "smollm2-135m", "builtin"):
        assert word in done.stdout


def test_info_shows_groups_windows_and_softcaps(folder: str) -> None:
    done = run("info", folder, "--length", "32")
    assert done.returncode == 0
    for word in ("groups of 2", "5 tokens in", "3.0", "5.0", "memory, 32 tokens"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("name", "positions", "window"),
    [
        ("gptj", "rotary: 4 of 8 dimensions of a head", "none"),
        ("cohere2", "1 of 2 layers without rotary positions", "5 tokens in 1 of 2 layers"),
        ("gpt_neo", "learned", "5 tokens in 1 of 2 layers"),
        ("gemma3", "(sliding_attention)", "5 tokens in 1 of 2 layers"),
    ],
)
def test_info_describes_positions_and_windows_of_families_that_say_it_in_other_words(
    name: str, positions: str, window: str
) -> None:
    model = tiny_model(name)
    assert positions in shown._positions(model)
    assert shown._windows(model.config).startswith(window)


def test_info_counts_experts() -> None:
    assert shown._experts(tiny_model("mixtral").config) == "4 per layer, 2 for each token"


def test_record_shows_tokens_answers_firings_and_identities(folder: str, tmp_path) -> None:
    done = run("record", folder, "--tokens", "5,6,7,8", "--out", str(tmp_path / "rec"))
    assert done.returncode == 0, done.stderr
    for word in ("#5", "Answers", "L3", "Identities", "residual"):
        assert word in done.stdout
    assert (tmp_path / "rec" / "recording.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "5,x"), "not a list of token ids"),
        ((), "Give one prompt: as text"),
        (("--tokens", "5,999"), "Unknown token id 999"),
        (("-p", "text"), "without a tokenizer"),
    ],
)
def test_bad_input_gives_exit_code_two_and_no_traceback(folder: str, arguments, message: str) -> None:
    done = run("record", folder, *arguments)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(folder: str) -> None:
    process = Started(command, "--debug", "record", folder, "--tokens", "5,x")
    assert "Traceback" in process.told()
    assert process.wait() != 0


# -- devices -------------------------------------------------------------------------------------------------


def test_every_command_that_takes_a_device_takes_a_device_map() -> None:
    top = typer.main.get_command(app)
    commands = [c for each in top.commands.values() for c in getattr(each, "commands", {"": each}).values()]
    takes = [{parameter.name for parameter in command.params} for command in commands]
    assert sum("device" in names for names in takes) > 15
    assert all(("device" in names) == ("device_map" in names) for names in takes)


def test_a_model_spread_by_a_file_records_and_checks(folder: str, tmp_path) -> None:
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)}
    file = tmp_path / "places.json"
    file.write_text(json.dumps(places))
    done = run(
        "record", folder, "--tokens", "5,6,7", "--device-map", str(file), "--out", str(tmp_path / "rec")
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rec" / "recording.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "device", "message"),
    [
        ("{}", "cpu", "--device cpu is one place for the whole model"),
        (None, "auto", "cannot be read: No such file"),
        ('{"model', "auto", "is not JSON"),
        ('["cpu"]', "auto", "is not a device map. Expected a JSON object"),
        ('{"model.layers": ["cpu"]}', "auto", "is not a device map. Expected a JSON object"),
        ('{"model.layers.9": "cpu", "": "cpu"}', "auto", "names 'model.layers.9', and the model has no such"),
    ],
)
def test_a_device_map_that_cannot_be_used_says_why(
    folder: str, tmp_path, content: str | None, device: str, message: str
) -> None:
    file = tmp_path / "places.json"
    if content is not None:
        file.write_text(content)
    done = run("info", folder, "--device", device, "--device-map", str(file))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
