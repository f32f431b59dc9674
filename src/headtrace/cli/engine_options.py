"""Options of the commands whose work several processes can share."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from headtrace.errors import InputError
from headtrace.extras import require_ray

ENGINES = ("local", "ray")

EngineName = Annotated[str, typer.Option("--engine", help="local (this machine) or ray.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="How many processes work (default: with local this one alone, with ray one per CPU here).",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="With ray: a cluster (host:port, or auto); default: a Ray on this machine alone.",
    ),
]


def check_engine(name: str) -> None:
    """An error that names the engines, or what one needs, before a model is loaded."""
    if name not in ENGINES:
        raise InputError(f"--engine {name!r}: choose {' or '.join(ENGINES)}.")
    if name == "ray":
        require_ray()


def command_line(arguments: Sequence[str]) -> str:
    """The command with these arguments, as this system's shell wants it written."""
    words = ["headtrace", *arguments]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def going_on(far: str = "") -> KeyboardInterrupt:
    """An interrupt that says how far it came, and how to go on."""
    words = ["Nothing is lost.", far, f"To go on: {command_line(sys.argv[1:])}"]
    return KeyboardInterrupt(" ".join(each for each in words if each))
