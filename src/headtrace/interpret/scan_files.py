"""Scans as files: one safetensors file, numbers as arrays and the rest as JSON in its header."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headtrace.errors import InputError
from headtrace.interpret.examples import ScoredSignal
from headtrace.interpret.heads import TENSORS, HeadSums
from headtrace.interpret.tally import Tally
from headtrace.writing import replacing

if TYPE_CHECKING:
    from headtrace.interpret.scan import Scan

SCHEMA = "headtrace.scan/2"


def save_scan(scan: Scan, folder: str | Path) -> Path:
    """Write a scan, whole or not at all."""
    from headtrace.interpret.scan import FILE

    arrays = dict(scan.tally.arrays())
    chunks = sorted(scan.contexts)
    ids = [scan.contexts[chunk][1] for chunk in chunks]
    arrays["context_chunk"] = np.array(chunks, dtype=np.int64)
    arrays["context_length"] = np.array([len(each) for each in ids], dtype=np.int64)
    arrays["context_tokens"] = np.array([token for each in ids for token in each], dtype=np.int64)
    if scan.heads is not None:
        arrays |= {f"head_{name}": getattr(scan.heads, name).numpy() for name in TENSORS}
    about = {
        "schema": SCHEMA,
        "options": scan.options,
        "complete": scan.complete,
        "signals": [asdict(signal) for signal in scan.signals],
        "contexts": [scan.contexts[chunk][0] for chunk in chunks],
        "labels": {str(token): label for token, label in scan.labels.items()},
    }
    path = Path(folder) / FILE
    with replacing(path) as temporary:
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(whole, temporary, metadata={"scan": json.dumps(about)})
    return path


def load_scan(folder: str | Path) -> Scan:
    """Read a scan; a file that is none, or is damaged, gets an error that says so."""
    from headtrace.interpret.scan import FILE, Scan

    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(
            f"There is no scan in {str(folder)!r}: expected the file {FILE}. Make one with scan(..., out=)."
        )
    try:
        with safe_open(path, "numpy") as file:
            arrays: dict[str, Any] = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
            about: dict[str, Any] = json.loads((file.metadata() or {})["scan"])
        if about["schema"] != SCHEMA:
            raise InputError(
                f"{str(path)!r} is of the form {about['schema']!r}, and this version reads {SCHEMA!r}. Make it anew."
            )
        return Scan(
            signals=tuple(
                ScoredSignal(**each | {"channels": tuple(each["channels"])}) for each in about["signals"]
            ),
            options=about["options"],
            tally=Tally(**{name: arrays[name] for name in Tally.__dataclass_fields__}),
            contexts=_contexts(arrays, about["contexts"]),
            labels={int(token): label for token, label in about["labels"].items()},
            heads=_heads(arrays),
            complete=about["complete"],
        )
    except InputError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{str(path)!r} is not a scan, or it is damaged ({error!r}). Delete it and scan again."
        ) from error


def _contexts(arrays: dict[str, Any], names: list[str]) -> dict[int, tuple[str, tuple[int, ...]]]:
    if not names:
        return {}
    ends = np.cumsum(arrays["context_length"])
    pieces = np.split(arrays["context_tokens"], ends[:-1])
    rows = zip(arrays["context_chunk"].tolist(), names, pieces, strict=True)
    return {chunk: (name, tuple(ids.tolist())) for chunk, name, ids in rows}


def _heads(arrays: dict[str, Any]) -> HeadSums | None:
    if f"head_{TENSORS[0]}" not in arrays:
        return None
    return HeadSums(*(torch.from_numpy(arrays[f"head_{name}"]) for name in TENSORS))
