"""What it costs to start, in processor time: without a model against `python -c pass`, with one against the imports
that the model itself needs (torch, transformers, its class). Prints JSON.

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

PASS, IMPORTS = "pass", "import torch, transformers, the model's class"
PROMPT = "When Mary and John went to the store, John gave a drink to"
WITHOUT_A_MODEL = {
    "import headtrace": ["-c", "import headtrace"],
    "import typer.rich_utils": ["-c", "import typer.rich_utils"],  # what help itself is made with
    "headtrace --help": ["-m", "headtrace", "--help"],
    "headtrace trace --help": ["-m", "headtrace", "trace", "--help"],
    "headtrace models": ["-m", "headtrace", "models"],
    "headtrace tasks": ["-m", "headtrace", "tasks"],
    "headtrace show": ["-m", "headtrace", "show", "circuit.json"],
    "headtrace view": ["-m", "headtrace", "view", "circuit.json", "--out", "page.html"],
}
WITH_A_MODEL = {
    "import what loads and traces": ["-c", "import headtrace; headtrace.load; headtrace.Tracer"],
    "headtrace info builtin": ["-m", "headtrace", "info", "builtin"],
}
BASES = {
    PASS: ["-c", PASS],
    IMPORTS: ["-c", "import torch, transformers; from transformers import AutoTokenizer, LlamaForCausalLM"],
}
AT_MOST = {
    "import headtrace": 2.5,
    "headtrace --help": 15.0,
    "seconds without a model": 1.0,
    "with a model": 1.2,
}


def processor_time(arguments: list[str], environment: dict[str, str]) -> float:
    """Seconds of the processor that a Python with these arguments takes, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    starts = BASES | WITHOUT_A_MODEL | WITH_A_MODEL
    times: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": f"{folder}/compiled", "OMP_NUM_THREADS": "1"}
        trace = ["-m", "headtrace", "trace", "builtin", "-p", PROMPT, "--out", "circuit.json"]
        processor_time(trace, environment)  # the circuit that is shown
        for number in range(rounds + 1):
            for name, arguments in starts.items():
                taken = processor_time(arguments, environment)
                if number:  # the first one compiles
                    times[name].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    found = {
        "benchmark": "startup",
        "over_python_c_pass": {name: round(medians[name] / medians[PASS], 1) for name in WITHOUT_A_MODEL},
        "seconds_without_a_model": {name: round(medians[name], 2) for name in WITHOUT_A_MODEL},
        "over_the_imports_of_the_model": {
            name: round(medians[name] / medians[IMPORTS], 2) for name in WITH_A_MODEL
        },
        "at_most": AT_MOST,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
