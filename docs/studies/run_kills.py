"""Kill a run again and again at random moments, then hold what it became against a run that nothing disturbed.

    python docs/studies/run_kills.py [--kills 20] [--prompts 510] [--seed 0]

Each time the same command is started, and killed (SIGKILL) a few shards later or while it loads the model; after
the last kill it may end by itself. Prints one JSON object: what was lost, what is there twice, which frames are the
same bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import headtrace


def command(out: Path, prompts: int) -> list[str]:
    words = ["run", "builtin", "--task", "ioi", "-n", str(prompts), "--out", str(out), "--shard-size", "5"]
    return [sys.executable, "-m", "headtrace", *words, "--json"]


def started(out: Path, prompts: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(out, prompts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def shards(out: Path) -> int:
    """How many shards are done."""
    return len(list((out / "shards").glob("*.json"))) if out.exists() else 0


def killed_at(out: Path, prompts: int, draw: random.Random) -> bool:
    """Start the run and kill it some shards later, or while it loads the model; false if it came to its end before."""
    process, more = started(out, prompts), draw.choice([None, 0, 1, 2, 3])
    wanted, seconds = shards(out) + (more or 0), draw.uniform(0, 6 if more is None else 0.2)
    while (
        more is not None
        and process.poll() is None
        and (shards(out) < wanted or not (out / "run.json").exists())
    ):
        time.sleep(0.002)
    time.sleep(seconds)
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=510)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        started(whole, given.prompts).wait()
        left: list[int | None] = []
        while len(left) < given.kills and killed_at(killed, given.prompts, draw):
            left.append(headtrace.open_run(killed).status().left if (killed / "run.json").exists() else None)
        started(killed, given.prompts).wait()
        print(json.dumps({"kills": len(left), "left_after_each": left, **compared(whole, killed)}, indent=1))


def compared(whole: Path, killed: Path) -> dict[str, Any]:
    runs = headtrace.open_run(whole), headtrace.open_run(killed)
    ids = [run.prompts.select("id").collect()["id"].to_list() for run in runs]
    same = {
        name: getattr(runs[0], name).collect().equals(getattr(runs[1], name).collect())
        for name in ("prompts", "nodes", "edges")
    }
    bytes_ = {
        path.relative_to(whole).as_posix(): path.read_bytes()
        == (killed / path.relative_to(whole)).read_bytes()
        for path in (whole / "shards").iterdir()
    }
    return {
        "prompts": len(runs[0]),
        "lost": len(set(ids[0]) - set(ids[1])),
        "twice": len(ids[1]) - len(set(ids[1])),
        "damaged": len(runs[1].status().damaged),
        "same_frames": same,
        "same_files": f"{sum(bytes_.values())} of {len(bytes_)}",
        "left_behind": [path.name for path in killed.rglob(".*")],
    }


if __name__ == "__main__":
    main()
