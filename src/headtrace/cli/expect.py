"""``headtrace expect``: circuits as tests."""

from __future__ import annotations

from pathlib import Path

import typer

from headtrace.cli import options
from headtrace.cli.output import check_output, emit, note, notes, say
from headtrace.errors import InputError


def expect(
    *,
    claims: str = typer.Argument(
        metavar="CLAIMS", help="A file of claims; or a circuit file, to make claims from it (--out)."
    ),
    model: str | None = typer.Option(
        None, "--model", help="The model to put them to: a name or a folder. For a circuit: default, its own."
    ),
    kept: float = typer.Option(
        0.5, help="Of a circuit: the share of what its model shows that is expected of another one."
    ),
    most: int = typer.Option(10, help="Of a circuit: claims of each kind, at most.", min=1),
    out: str | None = typer.Option(None, help="Of a circuit: the file of claims (.json) to write."),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Claims say what a model is expected to do: this head attends here, it carries at least so much of the answer, it
    attends because of this component. Each is PASS or FAIL; claims go from the lowest layer up, so that the first one
    that broke is where a difference begins. Exit code: 0 if all hold, 1 if one does not, 2 if the input cannot be used.

    Examples:

      headtrace trace builtin -p "When Mary and John went to the store, John gave a drink to" --answer " Mary"
          --wrong " John" --out circuit.json
      headtrace expect circuit.json --out claims.json
      headtrace expect claims.json --model ./finetuned
    """
    check_output(json, out)
    from headtrace.causal.expectations import expect as put_to
    from headtrace.causal.expectations import make_claims, read_claims, save_claims
    from headtrace.circuits import load_circuit

    if out is not None:
        circuit = load_circuit(claims)
        own = place.load(model or circuit.model.name)
        with notes.status("Measuring the claims"):
            made = make_claims(circuit, own, kept=kept, most=most)
        save_claims(made, out)
        emit({"claims": len(made), "out": out}, as_json=json, show=lambda: say(f"{len(made)} claims"))
        note(f"Wrote {out}")
        return
    if model is None:
        raise InputError(
            f"Say which model {Path(claims).name!r} is put to: --model NAME_OR_FOLDER. To make claims from a circuit, "
            "give --out claims.json."
        )
    given = read_claims(claims)
    loaded = place.load(model)
    with notes.status("Testing the claims"):
        found = put_to(given, loaded)
    emit(found.to_dict(), as_json=json, show=lambda: say(str(found)))
    raise typer.Exit(0 if found.passed else 1)
