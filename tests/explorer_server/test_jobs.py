"""The queue: one job at a time, bounded, in order; cancelled jobs stop and leave room; nothing is lost or piles up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Event

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.server.jobs import Compute, Finished, Job, QueueFullError

LONG = 20.0
"""Seconds after which something that should come at once did not come."""


class Held:
    """Work that goes on, reporting progress, until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go, self.steps = Event(), Event(), 0

    def __call__(self, job: Job) -> str:
        self.begun.set()
        while not self.let_go.wait(0.005):
            self.steps += 1
            job.progress(self.steps, 1000)
        return "let go"


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def compute(logged: list[str]) -> Iterator[Compute]:
    compute = Compute(max_waiting=2, kept_jobs=2, log=logged.append)
    compute.start()
    yield compute
    compute.stop()


def held(compute: Compute) -> tuple[Held, Job]:
    work = Held()
    job = compute.submit(work, keep=True)
    assert work.begun.wait(LONG)
    return work, job


def test_jobs_run_one_after_the_other_in_the_order_they_came(compute) -> None:
    ran: list[str] = []
    work, first = held(compute)
    others = [compute.submit(lambda _, name=name: ran.append(name)) for name in "ab"]
    assert [job.view().ahead for job in others] == [1, 2]
    assert ran == []
    work.let_go.set()
    for job in (first, *others):
        job.wait(LONG)
    assert first.result == "let go"
    assert ran == ["a", "b"]


def test_a_full_queue_says_when_to_come_again_and_takes_more_once_there_is_room(compute) -> None:
    work, _ = held(compute)
    waiting = [compute.submit(lambda _: None) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 computations are waiting") as full:
        compute.submit(lambda _: None)
    assert 1 <= full.value.retry_after <= 60
    compute.cancel(waiting[0])
    assert waiting[0].state == "cancelled"
    last = compute.submit(lambda _: 1)
    work.let_go.set()
    last.wait(LONG)
    assert last.result == 1


def test_cancelling_stops_the_work_itself_and_frees_the_queue(compute) -> None:
    work, job = held(compute)
    after = compute.submit(lambda _: "next")
    compute.cancel(job)
    after.wait(LONG)
    assert (job.state, job.result, after.result) == ("cancelled", None, "next")
    steps = work.steps
    assert not work.let_go.wait(0.1)
    assert work.steps == steps, "nothing runs any more"


def test_a_cancelled_job_stops_before_the_model_runs_again_whether_or_not_it_reports(compute) -> None:
    model, begun, cancelled, passes = headtrace.load("builtin"), Event(), Event(), []

    def work(_: Job) -> None:
        for n in range(100):
            model.end_logits(["When Mary"])
            passes.append(n)
            begun.set()
            assert cancelled.wait(LONG)

    job = compute.submit(work)
    assert begun.wait(LONG)
    compute.cancel(job)
    cancelled.set()
    job.wait(LONG)
    assert (job.state, passes) == ("cancelled", [0])
    assert model.end_logits(["When Mary"]).shape[0] == 1, "who is not in that job is not stopped"


def test_a_job_that_waits_and_is_cancelled_never_runs_and_those_behind_it_move_up(compute) -> None:
    work, _ = held(compute)
    ran: list[int] = []
    waiting = [compute.submit(lambda _, n=n: ran.append(n)) for n in range(2)]
    compute.cancel(waiting[0])
    assert waiting[1].view().ahead == 1
    work.let_go.set()
    waiting[1].wait(LONG)
    assert ran == [1]


def test_events_come_in_order_with_the_last_of_each_kind_and_an_end(compute) -> None:
    work, _ = held(compute)

    def traced(mine: Job) -> Finished:
        for step in range(1, 4):
            mine.progress(step, 3)
            mine.publish("partial", json.dumps({"circuit": step}))
        return Finished('{"circuit": "all"}')

    second = compute.submit(traced, keep=True)
    assert [event.name for event in second.events()] == ["queued"]
    heard = second.events()[-1].number
    work.let_go.set()
    second.wait(LONG)
    assert [(event.name, json.loads(event.data)) for event in second.events(heard)] == [
        ("queued", {"ahead": 0}),
        ("progress", {"done": 3, "of": 3}),
        ("done", {"circuit": "all"}),
    ]
    numbers = [event.number for event in second.events()]
    assert numbers == sorted(numbers)
    assert second.events(numbers[-1]) == []
    assert second.view().state == "done"


def test_a_mistake_of_the_client_is_told_in_full_and_one_of_the_server_only_in_the_log(
    compute, logged
) -> None:
    def mistaken(_: Job) -> None:
        raise InputError("There is no such head.")

    def broken(_: Job) -> None:
        raise ZeroDivisionError("secret detail")

    jobs = [compute.submit(work) for work in (mistaken, broken)]
    for job in jobs:
        job.wait(LONG)
    assert [job.state for job in jobs] == ["failed", "failed"]
    assert jobs[0].view().error == "There is no such head."
    assert "secret" not in str(jobs[1].view().error)
    assert len(logged) == 1
    assert "secret detail" in logged[0]
    assert all(job.error is not None and job.error.__traceback__ is None for job in jobs), "frames are let go"
    after = compute.submit(lambda _: "fine")
    after.wait(LONG)
    assert after.result == "fine"


def test_finished_jobs_are_kept_for_a_while_and_running_ones_always(compute) -> None:
    work, running = held(compute)
    work.let_go.set()
    running.wait(LONG)
    jobs = [compute.submit(lambda _: None, keep=True) for _ in range(2)]
    for job in jobs:
        job.wait(LONG)
    assert compute.find(running.id) is None
    assert compute.find(jobs[-1].id) is jobs[-1]
    assert compute.find("nothing") is None
    work, running = held(compute)
    for _ in range(2):
        compute.submit(lambda _: None, keep=True)
    assert compute.find(running.id) is running
    work.let_go.set()


def test_stopping_cancels_what_runs_and_what_waits_and_takes_nothing_more() -> None:
    compute = Compute(max_waiting=2)
    compute.start()
    _, running = held(compute)
    waiting = compute.submit(lambda _: 1)
    compute.stop(LONG)
    assert [running.state, waiting.state] == ["cancelled", "cancelled"]
    late = compute.submit(lambda _: 1)
    assert (late.state, late.result) == ("cancelled", None)
