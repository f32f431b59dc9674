"""Kill a run again and again at random moments, then hold what it became against a run that nothing disturbed.

    python docs/studies/run_kills.py [--kills 20] [--prompts 510] [--seed 0]

Each time the command is started anew and killed (SIGKILL) after a random part of the time that an undisturbed run
takes; when the kills are done it may end by itself. Prints one JSON object: what was lost, what is there twice,
which frames are the same bit for bit.
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
    words = ["run", "builtin", "--task", "ioi", "-n", str(prompts), "--out", str(out), "--shard-size", "10"]
    return [sys.executable, "-m", "headtrace", *words, "--json"]


def ended(out: Path, prompts: int, seconds: float | None = None) -> bool:
    """Start the run; whether it came to its end before it was killed."""
    process = subprocess.Popen(command(out, prompts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return False


def starting_time(out: Path, prompts: int) -> float:
    """Seconds until a run has loaded its model and begins to trace: most kills should come after that."""
    start = time.monotonic()
    process = subprocess.Popen(command(out, prompts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "run.json").exists():
        time.sleep(0.01)
    seconds = time.monotonic() - start
    process.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=510)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        start = time.monotonic()
        begins = starting_time(whole, given.prompts)
        lasts = time.monotonic() - start - begins
        kills, left = 0, []
        while kills < given.kills:
            # Each start may do a little: so many kills fit into one run. One in five comes while it is still loading.
            early = draw.random() < 0.2
            seconds = (
                draw.uniform(0, begins) if early else begins + draw.uniform(0, 1.5 * lasts / given.kills)
            )
            if ended(killed, given.prompts, seconds):
                break
            kills += 1
            left.append(headtrace.open_run(killed).status().left if (killed / "run.json").exists() else None)
        while not ended(killed, given.prompts):
            pass
        print(json.dumps({"kills": kills, "left_after_each": left, **compared(whole, killed)}, indent=1))


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
