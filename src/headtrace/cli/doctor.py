"""``headtrace doctor``: is everything here that headtrace needs, and are its numbers exact on this machine?"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import typer

from headtrace import __version__
from headtrace.cli import options
from headtrace.cli.output import check_output, emit, note, notes, show_table

PROMPT, ANSWER, WRONG = "When Mary and John went to the store, John gave a drink to", " Mary", " John"
NEEDED = ("torch", "transformers", "safetensors", "gguf", "numpy", "scipy", "polars", "pydantic")
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "sse_starlette"),
    "ray": ("ray",),
    "interpret": ("openai", "datasets"),
    "words": ("names", "countryinfo", "lemminflect"),
}
PURPOSE = {
    "serve": "for the explorer in the browser",
    "ray": "for runs and atlases on several machines",
    "interpret": "for words from an LLM endpoint and for corpora from the hub",
    "words": "for longer lists of first names, places and verbs in what words say of tokens",
}


@dataclass(frozen=True)
class Finding:
    """One line of what the doctor found."""

    what: str
    found: str
    ok: bool = True
    advice: str = ""
    """What to do if it is not as it should be, or to get what is not there."""


def doctor(
    *,
    json: options.Json = False,
) -> None:
    """
    Prints the versions, the device, the cache and the models that are ready, then puts the built-in model to the
    test: components sum to the residual stream, a circuit's predictions come true when the model is changed, and the
    flow between two prompts sums to their difference. Exit code: 0 if all is well, 1 if something is not.

    Examples:

      headtrace doctor
      headtrace doctor --json
    """
    check_output(json)
    findings = [*_versions(), *_extras(), *_cache(), *_models()]
    with notes.status("Loading the built-in model and testing its numbers"):
        findings += _device() + _self_test()
    well = all(each.ok for each in findings)
    emit(
        {"headtrace": __version__, "ok": well, "findings": [asdict(each) for each in findings]},
        as_json=json,
        show=lambda: _show(findings),
    )
    raise typer.Exit(0 if well else 1)


def _show(findings: list[Finding]) -> None:
    columns = {
        "": lambda each: "ok" if each.ok else "PROBLEM",
        "what": "{0.what}",
        "found": "{0.found}",
    }
    show_table(findings, columns, title=f"headtrace {__version__}", left=3)
    for each in findings:
        if each.advice:
            note(f"{each.what}: {each.advice}")
    wrong = sum(not each.ok for each in findings)
    note("All is well." if not wrong else f"{wrong} of {len(findings)} lines name a problem.")


# -- what is installed ---------------------------------------------------------------------------------------


def _versions() -> list[Finding]:
    found = [Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for package in NEEDED:
        here = find_spec(package) is not None
        advice = "" if here else f"pip install {package}"
        found.append(Finding(package, version(package) if here else "not installed", here, advice))
    return found


def _extras() -> list[Finding]:
    found: list[Finding] = []
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            advice = f"{PURPOSE[extra]}: pip install '.[{extra}]' in headtrace's folder"
            found.append(
                Finding(f"extra {extra}", f"optional, not installed ({', '.join(missing)})", advice=advice)
            )
        else:
            found.append(Finding(f"extra {extra}", "installed"))
    return found


def _cache() -> list[Finding]:
    from headtrace.errors import InputError
    from headtrace.tables import human
    from headtrace.writing import cache_folder

    try:
        folder = cache_folder("models", lasting=True).parent
    except InputError as error:
        return [Finding("cache", "no folder to write to", ok=False, advice=str(error))]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return [Finding("cache", f"{folder} ({human(size)})")]


def _models() -> list[Finding]:
    """Names whose weights are on this machine: no download is needed to load them."""
    from headtrace.models.packages import BUILTIN, PACKAGED, PACKAGED_GGUF, packaged_file

    ready = [BUILTIN, *(name for name, (package, _) in PACKAGED_GGUF.items() if find_spec(package))]
    ready += [name for name in PACKAGED if packaged_file(name) is not None]
    absent = [name for name in PACKAGED if name not in ready]
    advice = f"headtrace models get {absent[0]} adds another" if absent else ""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = sorted(Path(HF_HUB_CACHE).glob("models--*"))
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return [
        Finding("models here", ", ".join(ready), advice=advice),
        Finding("models of the hub here", ", ".join(names) or "none"),
    ]


def _device() -> list[Finding]:
    import torch

    from headtrace.models.devices import find_device

    chosen = find_device("auto")
    capability = torch.backends.cpu.get_cpu_capability()
    count = torch.get_num_threads()
    threads = f"{count} thread{'' if count == 1 else 's'}, {capability}"
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else threads
    return [Finding("device", f"{chosen} ({name})")]


# -- is it exact here? ---------------------------------------------------------------------------------------


def _self_test() -> list[Finding]:
    """Three claims of headtrace, tested on the built-in model: each with its error and the error allowed."""
    import headtrace
    from headtrace.errors import HeadtraceError
    from headtrace.models.identities import tolerance_for

    model = headtrace.load("builtin")
    tracer = headtrace.Tracer(model)
    allowed = tolerance_for(model.dtype)
    found: list[Finding] = []

    def tested(what: str, error: float, limit: float) -> None:
        advice = (
            ""
            if error <= limit
            else "Numbers are not exact here; please report this with the output of --json."
        )
        found.append(
            Finding(what, f"relative error {error:.1e}, allowed {limit:.0e}", error <= limit, advice)
        )

    try:
        tested("components sum to the residual", model.record(PROMPT).check().worst, allowed)
        circuit = tracer.trace(PROMPT, ANSWER, WRONG)
        report = headtrace.verify(circuit, model)
        found.append(
            Finding(
                "a circuit's predictions come true",
                f"{report.verdict}: {len(circuit.edges)} edges, largest error {report.max_prediction_error:.1e}",
                report.verdict == "PASS",
            )
        )
        other = PROMPT.replace("Mary", "Susan")
        flow = tracer.trace(PROMPT, ANSWER, WRONG, paths="difference", counterfactual=other)
        found.append(
            Finding("the flow sums to the difference of two prompts", f"{len(flow.edges)} edges, checked")
        )
    except HeadtraceError as error:
        found.append(Finding("self-test", str(error), ok=False))
    return found
