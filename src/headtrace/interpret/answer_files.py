"""Answers of language models on disk, and questions in files for services that answer many at a time.

Every answer is kept in the run's folder under the id of its question, so none is asked for twice. A batch service takes
the questions as a file of JSON lines, and returns another: ``BatchQuestions`` writes the one, ``read_batch_results``
reads the other into the folder. The format is that of OpenAI's batch API, which other services and vLLM share.

>>> ok = {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [{"message": {"content": "yes"}}]}}}
>>> read_line(json.dumps(ok))
ResultLine(id='a', text='yes', problem='', status=None)
>>> read_line('{"custom_id": "b", "error": {"message": "expired"}}')
ResultLine(id='b', text=None, problem='expired', status=None)
>>> read_line("{half") is None
True
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.interpret.chat_questions import ALTERNATIVES, ChatQuestion, also_refused, parameters, text_of
from headtrace.writing import write_text

URL = "/v1/chat/completions"


class BatchWritten(HeadtraceError):
    """A run stopped to have questions answered: they are in a file, and the answers are needed to go on."""

    def __init__(self, file: Path, questions: int) -> None:
        super().__init__(
            f"{questions} questions are in {file}. Give the file to a batch service, and its results to the same "
            "command with --batch-in (Python: read_batch_results) to go on."
        )
        self.file, self.questions = file, questions


@dataclass(frozen=True)
class KeptAnswers:
    """The answers in a run's folder: a file for each, named by the id of its question."""

    folder: Path

    def _file(self, id: str) -> Path:
        return self.folder / "answers" / id[:2] / f"{id}.json"

    def read(self, id: str) -> str | None:
        """The text of an answer; None where there is none, or its file is damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = json.loads(self._file(id).read_text("utf-8"))["answer"]
            return text if isinstance(text, str) else None
        return None

    def keep(self, id: str, model_name: str | None, text: str) -> None:
        write_text(self._file(id), json.dumps({"model": model_name, "answer": text}) + "\n")


# -- Questions to a file -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchQuestions:
    """Where a run writes the questions that have no answer yet."""

    file: Path
    folder: Path
    """The run's folder: it remembers what was asked, and which parameters the service refused."""

    def write(self, questions: Sequence[ChatQuestion[Any]], model_name: str) -> BatchWritten:
        """Write the questions, each once, and return what is to be raised."""
        asked = Asked.of(self.folder)
        lines = {
            question.id_for(model_name): {
                "custom_id": question.id_for(model_name),
                "method": "POST",
                "url": URL,
                "body": {
                    "model": model_name,
                    "messages": question.messages,
                    **parameters(question, asked.refused),
                },
            }
            for question in questions
        }
        asked.ids.update(lines)
        asked.save(self.folder)  # before the file: a file whose questions are unknown could not be read back
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines.values()))
        return BatchWritten(self.file, len(lines))


@dataclass
class Asked:
    """What a folder remembers of the batch files written for it."""

    ids: set[str] = field(default_factory=set[str])
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALTERNATIVES, 0))
    """For each parameter, how many of its alternatives the service has refused."""

    @staticmethod
    def _file(folder: Path) -> Path:
        return folder / "answers" / "asked.json"

    @classmethod
    def of(cls, folder: Path) -> Asked:
        """What the folder remembers; nothing where no batch file was written for it."""
        file = cls._file(folder)
        if not file.exists():
            return cls()
        try:
            content = json.loads(file.read_text("utf-8"))
            refused = {name: int(content["refused"][name]) for name in ALTERNATIVES}
            return cls({str(each) for each in content["ids"]}, refused)
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{file} is damaged: it lists the questions of the batch files written for this folder. Delete it, and "
                "write the questions again with --batch-out; answers that were read stay."
            ) from None

    def save(self, folder: Path) -> None:
        write_text(self._file(folder), json.dumps({"ids": sorted(self.ids), "refused": self.refused}) + "\n")


# -- Answers from a file -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultLine:
    """A line of a results file: the text of an answer, or what went wrong."""

    id: str
    text: str | None
    problem: str = ""
    status: int | None = None
    """The HTTP status of a request that was refused."""


@dataclass(frozen=True)
class BatchReport:
    """What was in the results files of a batch."""

    answers: int
    """Questions whose answer was read. Whether it is in the requested format shows when the run goes on."""
    failed: Mapping[str, int]
    """Requests without an answer, by the reason that the service gives."""
    unreadable: int
    """Lines that are not the JSON of a result."""
    unknown: int
    """Results for questions that were not written for this folder."""
    repeated: int
    """Further answers to a question that has one: the first counts."""
    missing: int
    """Questions written for this folder that still have no answer."""

    @property
    def complete(self) -> bool:
        """Whether every question that was written has an answer."""
        return not self.missing

    def __str__(self) -> str:
        parts = [f"{self.answers} answers read"]
        if self.failed:
            reasons = ", ".join(
                f"{count} x {reason}" for reason, count in Counter(self.failed).most_common(3)
            )
            parts.append(f"{sum(self.failed.values())} requests failed ({reasons})")
        for count, what in (
            (self.unreadable, "lines are not the JSON of a result"),
            (self.unknown, "results are for questions that this folder did not ask"),
            (self.repeated, "answers are to a question that had one"),
            (self.missing, "questions still have no answer"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return "; ".join(parts)


def read_line(line: str) -> ResultLine | None:
    """A line of a results file; None if it is not the JSON of a result."""
    try:
        content = json.loads(line)
        id = content["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(id, str):
        return None
    response = content.get("response") or {}
    body = response.get("body") if isinstance(response, dict) else None
    status = response.get("status_code", 200) if isinstance(response, dict) else None
    error = content.get("error") or (body.get("error") if isinstance(body, dict) else None)
    if error or status != 200:
        message = error.get("message") if isinstance(error, dict) else error
        problem = " ".join(str(message or f"status {status}").split())[:200]
        return ResultLine(id, None, problem, status if isinstance(status, int) and status != 200 else None)
    try:
        text = text_of(body["choices"][0])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        text = None
    return ResultLine(id, text) if isinstance(text, str) else ResultLine(id, None, "there is no text in it")


def read_batch_results(files: str | Path | Sequence[str | Path], folder: str | Path) -> BatchReport:
    """Read the results files of a batch service (output and errors) into the folder of a run, and count what they hold.

    The run then goes on from the folder: `interpret` with the same options and ``out=folder``.
    """
    folder = Path(folder)
    given = [Path(each) for each in ([files] if isinstance(files, (str, Path)) else files)]
    asked, kept = Asked.of(folder), KeptAnswers(folder)
    if not asked.ids:
        raise InputError(
            f"No batch file was written for {folder}, so there are no questions to read answers for. Write one first "
            "(--batch-out), with the same --out."
        )
    answers: dict[str, str] = {}
    failures: dict[str, ResultLine] = {}
    unreadable = unknown = repeated = 0
    for file in given:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"{shown(str(file))} cannot be read: {error.strerror or error}.") from None
        for line in lines:
            if not line.strip():
                continue
            found = read_line(line.decode("utf-8", "replace"))
            if found is None:
                unreadable += 1
            elif found.id not in asked.ids:
                unknown += 1
            elif found.text is None:
                failures[found.id] = found
            elif found.id in answers:
                repeated += 1
            else:
                answers[found.id] = found.text
    for id, text in answers.items():
        kept.keep(id, None, text)
    failed = [each for id, each in failures.items() if id not in answers]
    # What the service refuses is left out of the next file, as it is of requests that are sent one by one.
    names = {also_refused(asked.refused, each.status, each.problem) for each in failed} - {None}
    if names:
        asked.refused |= {name: asked.refused[name] + 1 for name in names if name is not None}
        asked.save(folder)
    return BatchReport(
        answers=len(answers),
        failed=Counter(each.problem for each in failed),
        unreadable=unreadable,
        unknown=unknown,
        repeated=repeated,
        missing=sum(kept.read(id) is None for id in asked.ids),
    )
