"""What the project says of itself: one version, workflows that can run, a valid citation, true pages."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import HeadtraceDeprecationWarning, deprecated
from tests.package.contents import (
    PATH_OF_THE_REPOSITORY,
    of_the_repository,
    problems_of_sdist,
    problems_of_wheel,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# One version


def test_the_version_is_stated_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/headtrace/__init__.py"
    assert CliRunner().invoke(app, ["--version"]).output == f"headtrace {headtrace.__version__}\n"
    heading = re.search(
        r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert heading is not None
    assert heading[1] == headtrace.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", heading[2])


def test_pages_of_a_release_call_nothing_unreleased() -> None:
    if "dev" in headtrace.__version__:
        return
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    early = re.compile(r"\bunreleased\b|\d\.dev\d")
    assert [page.name for page in pages if early.search(page.read_text(encoding="utf-8"))] == []


def test_no_other_module_has_a_version_of_its_own() -> None:
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value == headtrace.__version__:
                assert file.relative_to(ROOT / "src") == Path("headtrace/__init__.py")


def test_a_circuit_says_the_version_that_found_it() -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model, max_firings=1).trace("When Mary and John went to", answer=" the")
    assert circuit.method.version == headtrace.__version__


# One meaning for each name


def test_no_file_has_conflict_markers() -> None:
    marked = subprocess.run(
        ["git", "grep", "-lE", "^(<{7} |={7}$|>{7} )"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert marked == ""


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file.relative_to(ROOT / "src").as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_module_name_has_one_meaning_except_where_a_package_says_it() -> None:
    """Two modules may share a name where their packages tell them apart: a figure of what a package computes."""
    places: dict[str, list[str]] = {}
    for file in sorted((ROOT / "src" / "headtrace").rglob("*.py")):
        package = file.relative_to(ROOT / "src" / "headtrace").parts[0]
        if file.stem != "__init__" and package not in ("cli", "figures"):
            places.setdefault(file.stem, []).append(file.relative_to(ROOT / "src").as_posix())
    assert {name: where for name, where in places.items() if len(where) > 2} == {}


# Workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_run(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflow = _yaml(path)
    assert workflow["permissions"] == {"contents": "read"}, "no more than it needs"
    assert workflow[True], "when it runs (YAML reads 'on' as true)"
    for name, job in workflow["jobs"].items():
        assert set(job) >= {"runs-on", "steps"}, name
        assert set(_list(job.get("needs"))) <= set(workflow["jobs"])
        used = set(re.findall(r"\$\{\{ matrix\.(\w+)", str(job)))
        assert used <= set(job.get("strategy", {}).get("matrix", {})), name
        for step in job["steps"]:
            assert len({"run", "uses"} & set(step)) == 1, (name, step)
            command = step.get("run", "")
            assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets, command
            for module in re.findall(r"python -m (tests\.[\w.]+)", command):
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), command
            if "windows" in str(job):
                assert not re.search(r"\bmake\b|\.venv/bin|&&|sudo|'", command), (
                    f"{command}: also for Windows"
                )


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def test_every_system_and_python_that_is_promised_is_in_the_matrix() -> None:
    jobs = _yaml(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    matrix = jobs["newest"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest", "windows-latest"]
    assert matrix["python"] == PYTHONS
    classifiers = PROJECT["project"]["classifiers"]
    assert [c.split()[-1] for c in classifiers if re.search(r":: 3\.\d+$", c)] == PYTHONS
    for system in ("MacOS", "Microsoft :: Windows", "POSIX :: Linux"):
        assert f"Operating System :: {system}" in classifiers
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert "lowest-direct" in str(jobs["lowest"])
    assert {"docs", "wheel", "installed"} <= set(jobs)
    tried = jobs["installed"]["strategy"]["matrix"]
    extras = {*tried["extras"], *(each["extras"] for each in tried["include"])}
    assert extras == {"", "serve", "ray", "interpret", "words"}


def test_a_tag_is_published_without_a_password_once_it_was_tried() -> None:
    workflow = _yaml(ROOT / ".github" / "workflows" / "publish.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets" not in (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    assert "tests.package.installed dist --empty" in str(workflow["jobs"]["build"])


def test_pre_commit_runs_the_ruff_of_the_constraints() -> None:
    hooks = {repo["repo"]: repo for repo in _yaml(ROOT / ".pre-commit-config.yaml")["repos"]}
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert hooks["https://github.com/astral-sh/ruff-pre-commit"]["rev"] == f"v{pinned[1]}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.name
)
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = _yaml(path)
    assert set(form) >= {"name", "description", "body"}
    ids = [each["id"] for each in form["body"]]
    assert len(set(ids)) == len(ids)
    for each in form["body"]:
        assert each["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert set(each) <= {"type", "id", "attributes", "validations"}
        assert "label" in each["attributes"]


# Citation


def test_the_citation_has_what_the_format_requires() -> None:
    said = _yaml(ROOT / "CITATION.cff")
    assert said["cff-version"] == "1.2.0"
    assert set(said) >= {"message", "title", "authors"}
    assert said["license"] == PROJECT["project"]["license"]
    assert "version" not in said, "it is stated in one place"
    kinds = {"article", "conference-paper", "report", "software"}
    for reference in said["references"]:
        assert reference["type"] in kinds
        assert set(reference) >= {"title", "authors"}
        for author in reference["authors"]:
            assert set(author) in ({"family-names", "given-names"}, {"name"})
    titles = [reference["title"] for reference in said["references"]]
    assert len(set(titles)) == len(titles) == 5


def test_the_readme_and_the_citation_name_the_same_papers() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for reference in _yaml(ROOT / "CITATION.cff")["references"]:
        if (
            reference["year" if "year" in reference else "title"] in (2024, 2025)
            or "Singular" in reference["title"]
        ):
            assert reference["title"] in readme


# The README on PyPI


@pytest.fixture
def for_pypi(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the build makes of the README; the builder itself need not be installed."""
    builder = ModuleType("hatchling.metadata.plugin.interface")
    builder.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, builder.__name__, builder)
    return runpy.run_path(str(ROOT / "hatch_build.py"))["for_pypi"]


def test_pictures_and_links_of_the_readme_have_addresses_on_pypi(for_pypi: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = for_pypi(readme, "owner/name", "v1.2.3")
    assert "](https://raw.githubusercontent.com/owner/name/v1.2.3/docs/figures/mechanism.png)" in made
    assert "](https://github.com/owner/name/blob/v1.2.3/docs/gallery.md)" in made
    assert PATH_OF_THE_REPOSITORY.findall(made) == []
    prefix = r"https://(?:raw\.githubusercontent\.com/owner/name|github\.com/owner/name/blob)/v1\.2\.3/"
    assert re.sub(prefix, "", made) == readme, "nothing else is changed"


def test_without_an_address_the_readme_on_pypi_names_no_path(for_pypi: Any) -> None:
    made = for_pypi(
        "A ![picture](docs/a.png), [a page](docs/b.md#c) and [a site](https://a.b/c).", None, "v1"
    )
    assert made == "A , a page and [a site](https://a.b/c)."


# Stability


def test_the_table_of_file_forms_is_what_the_code_writes() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    said: set[str] = set(re.findall(r"headtrace\.[a-z]+/\d", page))
    written: set[str] = set()
    for file in sorted((ROOT / "src").rglob("*.py")):
        found = re.findall(
            r'^_?[A-Z]+ = "(headtrace\.[a-z]+/\d)"$', file.read_text(encoding="utf-8"), re.MULTILINE
        )
        written |= set(found)
    reports = {f"headtrace.{name}" for name in ("verification/2", "sufficiency/1", "interpretation/2")}
    reports |= {
        f"headtrace.{name}"
        for name in ("comparison/1", "runcomparison/1", "signals/1", "importance/1", "bench/1", "steps/1")
    }
    assert reports <= written, "their versions stand in the last rows of the table"
    assert said == written - reports


def test_what_will_end_is_heard_where_it_is_used() -> None:
    def old_name() -> None:
        deprecated("old_name", "0.4", "new_name")

    with pytest.warns(
        HeadtraceDeprecationWarning, match="will end with headtrace 0.4. Use new_name"
    ) as heard:
        old_name()
    assert heard[0].filename == __file__, "it points at whoever used it"
    assert issubclass(HeadtraceDeprecationWarning, FutureWarning), "shown by default"


def test_names_that_changed_still_work_and_warn() -> None:
    model = headtrace.load("builtin")
    tracer = headtrace.Tracer(model)
    with pytest.warns(HeadtraceDeprecationWarning, match="Use Tracer.request"):
        assert tracer.ask("When Mary and John", answer=" went").root.kind == "probability"
    with pytest.warns(HeadtraceDeprecationWarning, match="Use on_partial="):
        tracer.trace("When Mary and John", answer=" went", grown=lambda _: None)
    with pytest.warns(HeadtraceDeprecationWarning, match="assume_weights_unchanged"), model.settled():
        pass
    with pytest.warns(HeadtraceDeprecationWarning, match="refresh"):
        assert model.stamp is model.refresh()
    for package, old, new in (
        (headtrace.circuits, "Example", "EvidenceExample"),
        (headtrace.circuits, "Elsewhere", "CompetingKeySignal"),
        (headtrace.causal, "Failure", "Mismatch"),
        (headtrace.sinks, "Settings", "SinkSettings"),
    ):
        with pytest.warns(HeadtraceDeprecationWarning, match=f"Use {package.__name__}.{new}"):
            assert getattr(package, old) is getattr(package, new)


# The wheel: what would be wrong is said


def test_a_wheel_that_lacks_a_file_or_has_one_too_many_is_told() -> None:
    expected = {"headtrace/__init__.py": b"a", "headtrace/explorer/page/main.js": b"b"}
    about = {
        f"headtrace-9.dist-info/{name}": b"\nVersion: 9\n"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    said = f"\nVersion: {headtrace.__version__}\nDescription-Content-Type: text/markdown\n"
    about["headtrace-9.dist-info/METADATA"] = said.encode()
    assert problems_of_wheel(expected | about, expected) == []
    about["headtrace-9.dist-info/METADATA"] = f"{said}\n![A picture](docs/a.png)".encode()
    assert problems_of_wheel(expected | about, expected) == ["METADATA names the path ](docs/a.png)"]
    about["headtrace-9.dist-info/METADATA"] = said.encode()
    found = {"headtrace/__init__.py": b"other", "headtrace/writing.pyc": b"", "tests/a.py": b""} | about
    assert problems_of_wheel(found, expected) == [
        "headtrace/explorer/page/main.js is missing",
        "headtrace/writing.pyc does not belong there",
        "headtrace/__init__.py is another",
        "tests/a.py is no part of the package",
    ]
    assert "src/headtrace/explorer/page/main.js is missing" in problems_of_sdist({}, expected)


def test_what_commands_read_is_part_of_the_package() -> None:
    found = of_the_repository()
    for name in (
        "builtin/model.safetensors",
        "builtin/tokenizer.json",
        "runs/references/gpt2-ioi.json",
        "explorer/page/template.html",
        "explorer/atlas/template.html",
        "explorer/app/index.html",
        "py.typed",
    ):
        assert found.get(f"headtrace/{name}") is not None, name
