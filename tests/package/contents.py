"""What a wheel and an sdist hold, against the repository: ``python -m tests.package.contents dist``.

`python -m build` makes the wheel from the sdist, so that what is said here of the wheel shows that the sdist suffices.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import headtrace

ROOT = Path(__file__).parents[2]
LARGEST = 8_000_000
"""Bytes of a wheel or an sdist: the built-in model's 1.9 MB, the oracle's models in the tests, and some code."""
NEEDED = {
    "pyproject.toml",
    "hatch_build.py",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "SECURITY.md",
    "PKG-INFO",
}
PATH_OF_THE_REPOSITORY = re.compile(r"\]\((?!https?:|#)[^)\s]+\)")
"""A link or picture of Markdown that leads nowhere on PyPI."""


def of_the_repository() -> dict[str, bytes]:
    """Every file of the package that is under version control, by its name in a wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "src/headtrace"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    return {name.removeprefix("src/"): (ROOT / name).read_bytes() for name in names}


def of_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def of_sdist(path: Path) -> dict[str, bytes]:
    """The files of an sdist, without the folder that holds them all."""
    with tarfile.open(path) as sdist:
        files = [member for member in sdist.getmembers() if member.isfile()]
        return {each.name.partition("/")[2]: sdist.extractfile(each).read() for each in files}  # type: ignore[union-attr]


def problems_of_wheel(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """What is wrong with the files of a wheel, in words."""
    package = {name: content for name, content in found.items() if name.startswith("headtrace/")}
    about = {name.partition("/")[2]: content for name, content in found.items() if ".dist-info/" in name}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - package.keys())]
    problems += [f"{name} does not belong there" for name in sorted(package.keys() - expected.keys())]
    problems += [
        f"{name} is another"
        for name in sorted(expected.keys() & package.keys())
        if expected[name] != package[name]
    ]
    problems += [f"{name} is no part of the package" for name in found if not name.startswith("headtrace")]
    wanted = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    problems += [f"{name} is missing" for name in sorted(wanted - about.keys())]
    metadata = about.get("METADATA", b"").decode()
    if f"\nVersion: {headtrace.__version__}\n" not in metadata:
        problems.append(f"METADATA does not say version {headtrace.__version__}")
    if "\nDescription-Content-Type: text/markdown\n" not in metadata:
        problems.append("METADATA does not have the README")
    problems += [f"METADATA names the path {path}" for path in PATH_OF_THE_REPOSITORY.findall(metadata)]
    return problems


def problems_of_sdist(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """What is wrong with the files of an sdist, in words."""
    wanted = NEEDED | {f"src/{name}" for name in expected}
    problems = [f"{name} is missing" for name in sorted(wanted - found.keys())]
    odd = ("__pycache__", ".venv", ".pytest_cache", ".ruff_cache", ".hypothesis")
    return problems + [f"{name} does not belong there" for name in found if any(part in name for part in odd)]


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    expected = of_the_repository()
    held = of_wheel(wheel)
    for name in sorted(held):
        print(f"{len(held[name]):>9} {name}")
    problems = [f"{wheel.name}: {each}" for each in problems_of_wheel(held, expected)]
    problems += [f"{sdist.name}: {each}" for each in problems_of_sdist(of_sdist(sdist), expected)]
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        if path.stat().st_size > LARGEST:
            problems.append(f"{path.name} is larger than {LARGEST / 1e6:.0f} MB")
    if problems:
        sys.exit("\n".join(problems))
    data = sum(not name.endswith(".py") for name in expected)
    print(
        f"The wheel holds the package as it is in the repository: {len(expected)} files, {data} of them data."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
