"""``headtrace models`` and ``headtrace info``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.options import console


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("info")(info)


def models(json: options.Json = False) -> None:
    """List supported architectures and names that are ready to load.

    Examples:

      headtrace models

      headtrace models --json
    """
    from headtrace.models.architectures import ARCHITECTURES
    from headtrace.models.hub import ALIASES, BUILTIN

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
    options.emit({"architectures": families, "names": [BUILTIN, *ALIASES]}, as_json=json, show=_show_models)


def _show_models() -> None:
    from headtrace.models.architectures import ARCHITECTURES
    from headtrace.models.hub import ALIASES, BUILTIN, PACKAGED_GGUF

    table = Table()
    for column in ("family", "model_type", "norm", "positions", "also"):
        table.add_column(column)
    for facts in ARCHITECTURES.values():
        extras = [
            "QK-norm" if facts.query_key_norm else "",
            "norm after attention" if facts.attention_post_norm else "",
            "experts" if facts.experts else "",
        ]
        norm = "LayerNorm" if facts.norm == "layer" else "RMSNorm"
        positions = "rotary" if facts.rotary else "learned"
        table.add_row(facts.name, facts.model_type, norm, positions, ", ".join(filter(None, extras)))
    options.show_table("Architectures", table)
    names = Table()
    names.add_column("name")
    names.add_column("where it comes from")
    names.add_row(BUILTIN, "shipped inside headtrace")
    for alias, hub in ALIASES.items():
        packaged = (
            f" (or, without a hub, the package {PACKAGED_GGUF[alias][0]})" if alias in PACKAGED_GGUF else ""
        )
        names.add_row(alias, hub + packaged)
    options.show_table("Ready names", names)
    console.print(
        "Any other hub name (name@revision for one of its revisions), local folder in Hugging Face format or GGUF file "
        "of these families works too. Weights are read from safetensors and GGUF files only, never from pickles."
    )


def info(
    model: options.ModelName,
    tokens: Annotated[
        int, typer.Option("--length", help="Prompt length for the memory estimate.", min=1)
    ] = 128,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Show a model's shape: layers, heads, KV groups, norms, positions, softcaps, windows, memory.

    Examples:

      headtrace info smollm2-135m

      headtrace info gpt2-small --length 1024
    """
    loaded = options.load_model(model, revision, dtype, device, device_map)
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
        ("weights sha256", loaded.weights_sha256),
        (f"memory, {tokens} tokens", _memory(loaded, tokens)),
    ]
    rounding = _rounding(loaded)
    if rounding:
        rows.append(("rounding", rounding[0]))
    sizes = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "d_vocab", "weights_sha256")
    content: dict[str, Any] = {
        "model": loaded.name,
        "architecture": facts.model_type,
        "parameters": parameters,
    }
    content |= {name: getattr(loaded, name) for name in sizes}
    content |= {"length": tokens, "recording_bytes": recording_bytes(loaded, tokens), "described": dict(rows)}
    content["tracing_bytes"] = tracing_bytes(loaded, tokens)
    content |= {"dtype": loaded.own_dtype, "rounding": rounding[1] if rounding else None}
    options.emit(content, as_json=json, show=lambda: _show_info(loaded.name, rows))


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
        table.add_row(what, options.token_text(value))
    options.show_table(name, table)


def _positions(loaded: Any) -> str:
    from headtrace.models.architectures.facts import rotary_width

    facts, config = loaded.architecture, loaded.config
    context = "" if loaded.max_positions is None else f", context {loaded.max_positions}"
    if not facts.rotary:
        return f"learned{context}"
    if facts.rotary_layers is not None:
        context = f"; {facts.rotary_layers.count(False)} of {loaded.n_layers} layers do not turn{context}"
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
