"""Every command that computes something works on a model in half precision."""

from __future__ import annotations

import pytest

from headtrace.cli import main

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
HALF = ("--dtype", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a complete circuit of the built-in model in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    asked = ("-p", PROMPT, "--answer", " Mary", "--wrong", " John", "--paths", "complete", *HALF)
    assert run("trace", "builtin", *asked, "--out", folder / "c.json") == 0
    return folder


def run(*arguments: object) -> int:
    try:
        main([str(each) for each in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "{}/c.json", "--edges", "top:2"),
        ("sufficiency", "{}/c.json", "--counterfactual", OTHER),
        ("faithfulness", "{}/c.json"),
        ("edges", "{}/c.json", "L2H0"),
        ("decompose", "builtin", "-p", PROMPT, "--firing", "L2H0:14:10", *HALF),
        ("explain", "builtin", "-p", PROMPT, "--firing", "L2H0:14:10", *HALF),
        ("atlas", "builtin", "--corpus", "sampled:100", "--channels", "top:1", *HALF, "--out", "{}/atlas"),
        ("run", "builtin", "--task", "ioi", "-n", "30", *HALF, "--out", "{}/run"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_works_in_half_precision(command, folder, capsys) -> None:
    assert run(*(word.replace("{}", str(folder)) for word in command)) == 0, capsys.readouterr().err
