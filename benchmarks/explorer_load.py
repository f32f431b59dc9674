"""Fifty clients at once on a server of their own: what it answers, what memory it takes, and whether it is right.

Starts ``headtrace serve`` on a free port of the loopback. Every client asks without pause for what people ask for:
prompts, maps, heads, causes, interventions, traces and mechanisms (some of them cancelled), and now and then for what
does not exist. Afterwards a sample of the answers is compared with the Python API's. Prints JSON.

python benchmarks/explorer_load.py [--seconds 60] [--clients 50] [--model builtin]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

import headtrace
from headtrace.circuits.files import loads
from headtrace.tasks import load_task

HONEST = {200, 202, 404, 409, 422, 429}
WARM = 0.25
"""Share of the time after which memory is measured first: caches are full by then."""


@dataclass
class Seen:
    """What all clients saw."""

    port: int
    examples: list[Any]
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    recorded: dict[str, Any] = field(default_factory=dict)
    explained: dict[str, Any] = field(default_factory=dict)
    traced: dict[str, str] = field(default_factory=dict)


async def ask(seen: Seen, method: str, path: str, content: Any = None) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    body = b"" if content is None else json.dumps(content).encode()
    kind = b"" if content is None else b"Content-Type: application/json\r\n"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", seen.port)
    try:
        writer.write(head.encode() + kind + b"\r\n" + body)
        await writer.drain()
        said = await reader.read()
    finally:
        writer.close()
    top, _, rest = said.partition(b"\r\n\r\n")
    status = int(top.split(b" ", 2)[1])
    seen.statuses[status] += 1
    if status not in HONEST:
        seen.strange.append(f"{method} {path}: {status} {rest[:200]!r}")
    if status == 429:
        if b"retry-after" not in top.lower():
            seen.strange.append("429 without Retry-After")
        await asyncio.sleep(0.05)
    return status, rest


async def about(seen: Seen, name: str, example: Any, content: Any) -> tuple[int, bytes]:
    """A request about a recorded prompt, which is recorded first, as the page does."""
    status, said = await ask(seen, "POST", "/api/record", {"text": example.text})
    if status != 200:
        return status, said
    return await ask(seen, "POST", f"/api/{name}", {"recording": json.loads(said)["id"], **content})


async def client(seen: Seen, number: int, until: float) -> None:
    chance = random.Random(number)
    while time.monotonic() < until:
        kind = chance.choice(
            (
                "record",
                "record",
                "maps",
                "why",
                "why",
                "intervene",
                "trace",
                "cancel",
                "mechanism",
                "nonsense",
            )
        )
        example = chance.choice(seen.examples)
        seen.kinds[kind] += 1
        await globals()[f"_{kind}"](seen, chance, example)


async def _record(seen: Seen, _: random.Random, example: Any) -> None:
    status, said = await ask(seen, "POST", "/api/record", {"text": example.text})
    if status == 200:
        seen.recorded[example.text] = json.loads(said)


async def _maps(seen: Seen, chance: random.Random, example: Any) -> None:
    view = seen.recorded.get(example.text)
    if view is not None:  # 404 if it is not kept any more
        await ask(seen, "GET", f"/api/recordings/{view['id']}/patterns")
        await ask(
            seen, "GET", f"/api/recordings/{view['id']}/heads/{chance.randrange(3)}/{chance.randrange(5)}"
        )


async def _why(seen: Seen, chance: random.Random, example: Any) -> None:
    firing = {
        "layer": chance.randrange(1, 3),
        "head": chance.randrange(4),
        "dest": 10,
        "src": chance.randrange(12),
    }
    status, said = await about(seen, "why", example, {"firing": firing})
    if status == 200:
        seen.explained[example.text] = json.loads(said)


async def _intervene(seen: Seen, chance: random.Random, example: Any) -> None:
    site = {"kind": "head", "layer": chance.randrange(3), "head": chance.randrange(4)}
    asked = {"interventions": [{"kind": "component", "site": site}], "generate": 2}
    await about(seen, "intervene", example, asked)


async def _trace(seen: Seen, _: random.Random, example: Any, cancel: bool = False) -> None:
    asked = {"answer": example.answer, "wrong": example.wrong, "paths": "attention"}
    status, said = await about(seen, "trace", example, asked)
    if status != 202:
        return
    id = json.loads(said)["id"]
    if cancel:
        await ask(seen, "DELETE", f"/api/jobs/{id}")
        return
    await ask(seen, "GET", f"/api/jobs/{id}/events")
    status, said = await ask(seen, "GET", f"/api/jobs/{id}/circuit.json")
    if status == 200:
        seen.traced[example.text] = said.decode()


async def _mechanism(seen: Seen, chance: random.Random, example: Any) -> None:
    await about(seen, "question", example, {})
    status, said = await about(seen, "mechanism", example, {})
    if status == 202:
        id = json.loads(said)["id"]
        if chance.random() < 0.5:
            await ask(seen, "DELETE", f"/api/jobs/{id}")
        await ask(seen, "GET", f"/api/jobs/{id}/events")


async def _cancel(seen: Seen, chance: random.Random, example: Any) -> None:
    await _trace(seen, chance, example, cancel=True)


async def _nonsense(seen: Seen, chance: random.Random, _: Any) -> None:
    await ask(seen, "GET", "/api/jobs/nothing")
    await ask(seen, "POST", "/api/record", {"text": "zyx" * chance.randrange(1, 200)})


async def load(seen: Seen, server: psutil.Process, clients: int, seconds: float) -> list[int]:
    """Let all of them ask; resident memory of the server along the way."""
    until, start = time.monotonic() + seconds, time.monotonic()
    asking = asyncio.gather(*(client(seen, n, until) for n in range(clients)))
    resident: list[int] = []
    while not asking.done():
        await asyncio.wait((asking,), timeout=seconds / 20)
        if time.monotonic() - start >= WARM * seconds:
            resident.append(server.memory_info().rss)
    await asking
    return resident


def wrong_answers(model: headtrace.Model, seen: Seen, most: int = 12) -> tuple[int, list[str]]:
    """How many answers were compared with the Python API's, and which of them differ."""
    compared, wrong, tracer = 0, list[str](), headtrace.Tracer(model)
    by_text = {example.text: example for example in seen.examples}
    for text, view in list(seen.recorded.items())[:most]:
        compared += 1
        top = model.record(text).top_answers(1)[0]
        if view["answers"][0]["id"] != top[1] or abs(view["answers"][0]["probability"] - top[2]) > 1e-4:
            wrong.append(f"record {text!r}")
    for text, view in list(seen.explained.items())[:most]:
        compared += 1
        f = view["firing"]
        why = tracer.explain(text, f"L{f['layer']}H{f['head']}:{f['dest']}:{f['src']}")
        found = [(c["kind"], c["layer"], c["head"], c["channels"]) for c in view["query"]["causes"]]
        if found != [(c.site.kind, c.site.layer, c.site.head, list(c.channels or ())) for c in why.query]:
            wrong.append(f"why {text!r} {f}")
    for text, circuit in list(seen.traced.items())[:most]:
        compared += 1
        example = by_text[text]
        expected = tracer.trace(text, answer=example.answer, wrong=example.wrong)
        if loads(circuit).edges != expected.edges:
            wrong.append(f"trace {text!r}")
    return compared, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    model = headtrace.load("builtin")
    examples = load_task("ioi", model.tokenizer, n_per_cell=10).spread(80)
    command = [sys.executable, "-m", "headtrace", "serve", "builtin", "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().strip().rstrip("/").rpartition(":")[2])
            seen = Seen(port, list(examples))
            resident = asyncio.run(load(seen, psutil.Process(process.pid), options.clients, options.seconds))
        finally:
            process.terminate()
            process.wait(30)
    compared, wrong = wrong_answers(model, seen)
    told = {
        "benchmark": "explorer_load",
        "clients": options.clients,
        "seconds": options.seconds,
        "requests": sum(seen.statuses.values()),
        "statuses": dict(sorted(seen.statuses.items())),
        "asked": dict(seen.kinds),
        "answers that are not honest": seen.strange[:5],
        "resident MB, warm and at the end": [round(resident[i] / 1e6) for i in (0, -1)],
        "growth": round(resident[-1] / resident[0] - 1, 3),
        "compared with the Python API": compared,
        "wrong": wrong,
        "required": {"answers that are not honest": [], "growth": 0.1, "wrong": []},
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
