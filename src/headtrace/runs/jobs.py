"""Work that is done shard by shard, as plain data: what an engine hands to its workers, whatever the work is.

>>> import headtrace
>>> place = ModelPlace.of(headtrace.load("builtin"))
>>> job = Job("headtrace.runs.work:open_work", {"url": "runs/ioi", "model": place.options(), "made": {}})
>>> place.load()
Model('builtin', ...)

A job names a function that opens it, and with what. What that function gives does one shard: it takes the shard's
number, writes what comes of it where all can see it, and answers with a line of text. Runs open a tracer
(`headtrace.runs.work`), scans of a corpus a reader (`headtrace.interpret.scan_work`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from headtrace.errors import HeadtraceError, InputError
from headtrace.extras import require_ray

if TYPE_CHECKING:
    from headtrace.models import Model

Engine = Literal["local", "ray"]
Shard = Callable[[int], str]


@dataclass(frozen=True)
class Job:
    """How a process opens the work."""

    opener: str
    """``module:function``."""
    options: dict[str, Any]
    """Its keyword arguments, as JSON has them."""

    def open(self) -> Shard:
        module, _, name = self.opener.partition(":")
        return getattr(import_module(module), name)(**self.options)


class Worker:
    """Opens a job in its own process, and does the shards whose numbers it is given."""

    def __init__(self, job: Job) -> None:
        self.problem = ""
        try:
            self.shard = job.open()
        except HeadtraceError as error:  # the same on every worker: told once, not tried again
            self.problem = str(error)

    def do(self, shard: int) -> tuple[str, str]:
        """The answer, or the problem."""
        if self.problem:
            return "", self.problem
        try:
            return self.shard(shard), ""
        except HeadtraceError as error:
            return "", str(error)


@dataclass(frozen=True)
class Engines:
    """Which workers there are: none but this process, several on this machine, or those of a Ray."""

    engine: Engine = "local"
    workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            choices = " or ".join(map(repr, get_args(Engine)))
            raise InputError(f"engine={self.engine!r}: choose {choices}.")
        if self.engine == "ray":
            require_ray()
        if self.engine == "local" and self.ray_address is not None:
            raise InputError("ray_address belongs to engine='ray': the local engine has its own processes.")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers={self.workers}: at least one is needed.")

    @property
    def here(self) -> bool:
        """Whether this process does all by itself."""
        return self.engine == "local" and self.workers is None

    def answers(self, job: Job, shards: Sequence[int]) -> Iterator[str]:
        """Do shards with several workers, and give the answer of each when it is there: in whatever order."""
        if self.engine == "ray":
            from headtrace.runs.ray_data import work_with_ray

            return work_with_ray(job, shards, self.workers, self.ray_address)
        from headtrace.runs.processes import work_in_processes

        return work_in_processes(job, shards, self.workers or 1)


@dataclass(frozen=True)
class ModelPlace:
    """A model as other processes find it."""

    place: str
    """The name or place to load it from."""
    name: str
    revision: str | None
    dtype: str
    device: str
    weights_sha256: str

    @classmethod
    def of(cls, model: Model) -> ModelPlace:
        from headtrace.models.load import loadable_place

        place = loadable_place(model.name, model.revision)
        if place is None:
            raise InputError(
                f"The model {model.name!r} was made in this process and has no name or folder that a worker could load "
                "it from. Save it (model.hf.save_pretrained(folder), and its tokenizer), load that folder with "
                "headtrace.load, or work in this process: engine='local' without workers."
            )
        return cls(
            place=place,
            name=model.name,
            revision=model.revision,
            dtype=model.own_dtype,
            device="cpu" if model.device.type == "cpu" else "auto",
            weights_sha256=model.weights_sha256,
        )

    def options(self) -> dict[str, Any]:
        return asdict(self)

    def load(self) -> Model:
        """The model, where a worker runs; an error if it is another one there."""
        from headtrace.models import load

        model = load(self.place, revision=self.revision, dtype=self.dtype, device=self.device)
        model.name = self.name  # as results are to call it, wherever a worker finds it
        if model.weights_sha256 != self.weights_sha256:
            raise InputError(
                f"{self.place!r} has other weights where the worker runs ({socket.gethostname()}) than the model that "
                "the work was started with. Save the model in a folder that all nodes see, and load it from there."
            )
        return model
