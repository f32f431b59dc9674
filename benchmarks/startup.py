"""What it costs to start: `import headtrace` and `headtrace --help`, as ratios to `python -c pass`. Prints JSON.

Times are those of the processor, of processes of their own, measured in turn; compiled files are kept in a folder of
this benchmark's, as an installed package has them.

python benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

PASS = "pass"
STARTS = {
    PASS: ["-c", "pass"],
    "import headtrace": ["-c", "import headtrace"],
    "import typer.rich_utils": ["-c", "import typer.rich_utils"],  # what help itself is made with
    "headtrace --help": ["-m", "headtrace", "--help"],
    "headtrace trace --help": ["-m", "headtrace", "trace", "--help"],
}
AT_MOST = {"import headtrace": 2.5, "headtrace --help": 15.0}


def processor_time(arguments: list[str], environment: dict[str, str]) -> float:
    """Seconds of the processor that a Python with these arguments takes, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as compiled:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = compiled
        times: dict[str, list[float]] = {name: [] for name in STARTS}
        for number in range(rounds + 1):
            for name, arguments in STARTS.items():
                taken = processor_time(arguments, environment)
                if number:  # the first one compiles
                    times[name].append(taken)
    plain = statistics.median(times[PASS])
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "over_python_c_pass": {
                    name: round(statistics.median(found) / plain, 1)
                    for name, found in times.items()
                    if name != PASS
                },
                "at_most": AT_MOST,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
