"""``headtrace doctor`` says what is here, and finds numbers that are not exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headtrace.cli import app
from headtrace.models import Recording

CHECKS = {
    "components sum to the residual",
    "a circuit's predictions come true",
    "the flow sums to the difference of two prompts",
}


def _run() -> tuple[int, dict[str, dict[str, object]]]:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    return done.exit_code, {each["what"]: each for each in json.loads(done.stdout)["findings"]}


def test_a_sound_installation_is_found_to_be_exact() -> None:
    code, found = _run()
    assert code == 0
    assert found.keys() >= CHECKS | {"python", "torch", "device", "cache", "models here"}
    assert all(each["ok"] for each in found.values())
    assert "builtin" in str(found["models here"]["found"])


def test_a_model_whose_numbers_are_off_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of one layer is changed behind the back of the recording: the sum no longer holds."""
    whole = Recording.check

    def check(self: Recording, *args: object, **how: object) -> object:
        with torch.inference_mode():
            self.mlp_writes[0][..., 0] += 1.0
        return whole(self, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Recording, "check", check)
    code, found = _run()
    assert code == 1
    assert not found["self-test"]["ok"]


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("HEADTRACE_CACHE", str(in_the_way / "cache"))
    code, found = _run()
    assert code == 1
    assert "HEADTRACE_CACHE" in str(found["cache"]["advice"])
