"""What `headtrace trace`, `explain` and `run` ask of a tracer: the options that they share."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.errors import InputError

PATHS = ("attention", "content", "complete")
MethodName = Annotated[str, typer.Option(help="acc++, acc, svt, or one that a package adds.")]
TauNumber = Annotated[
    float | None,
    typer.Option(help="Attention that counts as attending (default: min(1, 2.5 / visible keys))."),
]
PathsName = Annotated[
    str,
    typer.Option(
        help="attention (why heads attend), content (what is moved, through values and MLPs) or complete (both)."
    ),
]
RootName = Annotated[
    str | None,
    typer.Option(help="linear, probability or heads (default: linear if there is a wrong answer)."),
]
TopK = Annotated[int | None, typer.Option(help="Explain the k likeliest answers together.")]
HeadNames = Annotated[str | None, typer.Option(help="Start from these heads at the last token: L9H9,L10H0.")]
MaxFirings = Annotated[int, typer.Option(help="Expand at most this many firings per prompt (0: no limit).")]
MinInfluence = Annotated[
    float | None,
    typer.Option(help="Do not expand what has less influence (default: 0 for attention, else 0.02)."),
]
IgSteps = Annotated[
    int | None, typer.Option(help="For acc++: intervals of the integrated gradients (default: 64).")
]
SvtChannels = Annotated[
    str | None, typer.Option(help="For svt: signal (default), or all (the control without SVD).")
]


PatternsName = Annotated[
    str,
    typer.Option(
        "--patterns",
        help="Attention patterns: keep, recompute (for long prompts), or auto, by their size.",
    ),
]


def check_paths(paths: str) -> None:
    if paths not in PATHS:
        raise InputError(f"--paths {paths!r}: choose {', '.join(PATHS)}.")
