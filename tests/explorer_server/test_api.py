"""Every route of a live server answers what the Python API computes; what fails leaves the model as it was."""

from __future__ import annotations

import json
import socket
from threading import Event, Thread
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

import headtrace
from headtrace.circuits.files import loads
from headtrace.explorer.panels import Settings, circuits
from headtrace.explorer.panels.circuits import RunSource
from headtrace.explorer.server.jobs import Job
from headtrace.tasks import load_task
from tests.explorer_server.live import LONG, Answer, Live, live

IOI = "When Mary and John went to the store, John gave a drink to"
PROMPT = {"text": IOI}
LONG_PROMPT = " ".join([IOI] * 3)
ROOT = {"answer": " Mary", "wrong": " John"}
FIRING = {"layer": 2, "head": 0, "dest": 14, "src": 10}
TRACE = {**ROOT, "paths": "attention"}
ABLATION = {"kind": "component", "site": {"kind": "head", "layer": 2, "head": 0, "dest": 14}}


def good(answer: Answer, status: int = 200) -> Any:
    assert answer.status == status, answer.body
    return answer.json()


def wrong(answer: Answer, status: int, code: str, words: str = "") -> None:
    assert (answer.status, answer.json()["code"]) == (status, code), answer.body
    assert words in answer.json()["message"]
    assert "Traceback" not in answer.json()["message"]


@pytest.fixture(scope="module")
def traced(server: Live) -> str:
    """The id of a job that has traced a circuit."""
    id = good(server.about("trace", PROMPT, TRACE), 202)["id"]
    assert [name for _, name, _ in server.events(id)][-1] == "done"
    return id


@pytest.fixture(autouse=True)
def model_stays_as_it_was(builtin):
    """Whatever is asked for, the model answers the same afterwards, and nothing is left hooked to it."""

    def seen() -> tuple[Any, ...]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in builtin.hf.modules()]
        modes = [m.training for m in builtin.hf.modules()]
        return hooks, modes, builtin.hf.config._attn_implementation, builtin.refresh()

    before, logits = seen(), builtin.end_logits(IOI)
    yield
    assert seen() == before
    assert torch.equal(builtin.end_logits(IOI), logits)


def test_the_server_says_what_it_serves_and_within_which_limits(server: Live, builtin) -> None:
    view = good(server.get("/api/server"))
    assert view["version"] == headtrace.__version__
    assert [model["name"] for model in view["models"]] == ["builtin", "builtin"]
    assert view["models"][0]["n_layers"] == builtin.n_layers
    assert (view["max_tokens"], view["atlas"], view["run"]) == (40, False, False)
    assert {task["name"] for task in view["tasks"]} >= {"ioi", "greater-than"}


def test_examples_of_a_task(server: Live) -> None:
    examples = good(server.get("/api/tasks/ioi/examples?count=3&seed=1"))
    assert len(examples) == 3
    assert all(example["answer"] != example["wrong"] for example in examples)
    wrong(server.get("/api/tasks/..%2fpasswd/examples"), 404, "not_found")
    wrong(server.get("/api/tasks/nothing/examples"), 422, "input", "nothing")
    wrong(server.get("/api/tasks/ioi/examples?count=0"), 422, "input", "count")


def test_a_recorded_prompt_is_what_the_model_records(server: Live, builtin) -> None:
    view = good(server.post("/api/record", PROMPT))
    recording = builtin.record(IOI)
    assert view["tokens"] == list(recording.tokens())
    assert view["token_ids"] == recording.token_ids[0].tolist()
    assert [answer["id"] for answer in view["answers"]][:1] == [recording.top_answers(1)[0][1]]
    assert len(view["heads"]) == builtin.n_layers * builtin.n_heads
    by_ids = good(server.post("/api/record", {"tokens": view["token_ids"]}))
    assert (by_ids["text"], by_ids["answers"]) == (None, view["answers"])
    assert good(server.post("/api/record", PROMPT | {"model": 1}))["id"] != view["id"]


def test_attention_maps_and_single_heads(server: Live, builtin) -> None:
    view, patterns = good(server.post("/api/record", PROMPT)), builtin.record(IOI).patterns[:, 0]
    answer = server.get(f"/api/recordings/{view['id']}/patterns")
    assert answer.headers["content-type"] == "application/octet-stream"
    n = len(view["tokens"])
    dest, src = np.tril_indices(n)
    expected = patterns.numpy()[..., dest, src] * 255
    found = np.frombuffer(answer.body, np.uint8).reshape(expected.shape)
    assert np.abs(found - expected).max() <= 0.5 + 1e-3  # a byte is the nearest of 256
    head = good(server.get(f"/api/recordings/{view['id']}/heads/2/0"))
    torch.testing.assert_close(
        torch.tensor(head["attention"][14]), patterns[2, 0, 14, :15], atol=1e-6, rtol=1e-5
    )
    wrong(server.get(f"/api/recordings/{view['id']}/heads/99/0"), 422, "input", "L99H0")
    forgotten = server.get("/api/recordings/forgotten/patterns")
    wrong(forgotten, 404, "not_kept", "again")
    assert forgotten.headers["content-type"] == "application/json"


def test_why_gives_the_causes_that_the_tracer_finds_without_running_the_model_again(
    server: Live, builtin, monkeypatch
) -> None:
    recorded = {"recording": good(server.post("/api/record", PROMPT))["id"]}
    ran: list[int] = []
    forward = type(builtin.hf).forward
    monkeypatch.setattr(type(builtin.hf), "forward", lambda *a, **k: ran.append(1) or forward(*a, **k))
    view = good(server.post("/api/why", recorded | {"firing": FIRING}))
    assert ran == []
    expected = headtrace.Tracer(builtin).explain(IOI, "L2H0:14:10")
    assert view["attention"] == pytest.approx(expected.attention, rel=1e-5)
    for side, causes in (("query", expected.query), ("key", expected.key)):
        found = [(c["kind"], c["layer"], c["head"], c["channels"]) for c in view[side]["causes"]]
        sites = [(c.site.kind, c.site.layer, c.site.head, list(c.channels or ())) for c in causes]
        assert found == sites
    for change, words in (({"layer": 7}, "L7H0"), ({"src": 15}, "outside")):
        wrong(server.post("/api/why", recorded | {"firing": FIRING | change}), 422, "input", words)


def test_a_recording_that_was_dropped_is_not_found_by_any_request_until_it_is_recorded_again(builtin) -> None:
    with live(builtin, Settings(cached_recordings=1)) as server:
        recorded = {"recording": good(server.post("/api/record", PROMPT))["id"]}
        good(server.post("/api/record", {"text": "When Mary and John went"}))
        asked = {"why": {"firing": FIRING}, "intervene": {"interventions": [ABLATION]}, "trace": TRACE}
        for name, content in asked.items():
            wrong(server.post(f"/api/{name}", recorded | content), 404, "not_kept", "again")
        assert good(server.post("/api/record", PROMPT))["id"] == recorded["recording"]
        for name, content in asked.items():
            good(server.about(name, PROMPT, content), 202 if name == "trace" else 200)


def test_a_trace_tells_how_far_it_is_and_ends_with_the_circuit_of_the_tracer(server: Live, builtin) -> None:
    job = good(server.about("trace", PROMPT, TRACE), 202)
    events = list(server.events(job["id"]))
    numbers, names = [number for number, _, _ in events], [name for _, name, _ in events]
    assert numbers == sorted(set(numbers))
    assert names[-1] == "done"
    assert set(names) <= {"queued", "progress", "partial", "done"}
    assert "progress" in names
    view = good(server.get(f"/api/jobs/{job['id']}"))
    assert (view["state"], view["error"]) == ("done", None)
    expected = headtrace.Tracer(builtin).trace(IOI, answer=" Mary", wrong=" John")
    saved = server.get(f"/api/jobs/{job['id']}/circuit.json")
    assert loads(saved.body.decode()).edges == expected.edges
    circuit = good(server.get(f"/api/jobs/{job['id']}/circuit"))
    assert circuit == events[-1][2]
    assert len(circuit["circuit"]["edges"]) == len(expected.edges)


def test_a_listener_that_comes_late_or_again_hears_what_still_counts(server: Live, traced: str) -> None:
    events = list(server.events(traced))
    assert events[-1][1] == "done"
    assert list(server.events(traced, after=events[-2][0])) == events[-1:]
    again = server.get(f"/api/jobs/{traced}/events", Last_Event_ID=str(events[-1][0]))
    assert (again.status, again.body) == (204, b""), "a browser that comes back does not come again"
    assert server.get(f"/api/jobs/{traced}/events", Last_Event_ID="x").status == 200


def test_the_page_of_a_circuit_is_a_file_to_keep(server: Live, traced: str) -> None:
    answer = server.get(f"/api/jobs/{traced}/page.html")
    assert answer.status == 200
    assert answer.headers["content-disposition"] == 'attachment; filename="circuit.html"'
    assert b"<!doctype html>" in answer.body[:100].lower()


def test_there_is_no_job_and_no_circuit_of_what_does_not_exist(server: Live) -> None:
    for path in ("", "/events", "/circuit", "/circuit.json", "/page.html"):
        wrong(server.get(f"/api/jobs/none{path}"), 404, "no_job")
    wrong(server.ask("DELETE", "/api/jobs/none"), 404, "no_job")


def test_a_trace_that_fails_says_why(server: Live) -> None:
    wrong(server.about("trace", {"text": LONG_PROMPT}, TRACE), 422, "input", "40 are served")
    long = TRACE | {"paths": "difference", "counterfactual": LONG_PROMPT}
    job = good(server.about("trace", PROMPT, long), 202)
    assert list(server.events(job["id"]))[-1][1:] == (
        "failed",
        {"error": good(server.get(f"/api/jobs/{job['id']}"))["error"]},
    )
    assert "equally long" in good(server.get(f"/api/jobs/{job['id']}"))["error"]
    wrong(server.get(f"/api/jobs/{job['id']}/circuit"), 409, "failed", "equally long")


def test_interventions_change_what_the_api_says_they_change(server: Live, builtin) -> None:
    asked = {"interventions": [ABLATION], **ROOT, "generate": 2}
    view = good(server.about("intervene", PROMPT, asked))
    assert view["clean"]["id"] == good(server.post("/api/record", PROMPT))["id"]
    assert view["changed"]["id"] != view["clean"]["id"]
    assert server.get(f"/api/recordings/{view['changed']['id']}/patterns").status == 200
    logits = builtin.end_logits(IOI)[0]
    mary, john = (builtin.token_id(answer, prompt=IOI) for answer in (" Mary", " John"))
    assert view["metric"]["before"] == pytest.approx(float(logits[mary] - logits[john]), rel=1e-4)
    assert view["metric"]["after"] != view["metric"]["before"]
    wrong(server.about("intervene", PROMPT, asked | {"generate": 30}), 422, "input", "Generate fewer")
    bad = ABLATION | {"site": {"kind": "head", "layer": 9, "head": 0}}
    wrong(server.about("intervene", PROMPT, asked | {"interventions": [bad]}), 422, "input")
    of_changed = {"recording": view["changed"]["id"], "firing": FIRING}
    wrong(server.post("/api/why", of_changed), 422, "input", "under interventions")


def test_without_a_run_its_routes_say_how_to_serve_one(server: Live) -> None:
    for path in ("prompts", "map", "circuits/a%2Fb"):
        wrong(server.get(f"/api/run/{path}"), 404, "no_run", "--run")


def test_a_run_is_searched_and_mapped_and_its_circuits_opened(builtin, tmp_path) -> None:
    run = headtrace.run(
        builtin, load_task("ioi", builtin.tokenizer, n_per_cell=1).spread(12), out=tmp_path / "ioi"
    )
    with live(builtin, run=RunSource(tmp_path / "ioi")) as server:
        assert good(server.get("/api/server"))["run"] is True
        page = good(server.get("/api/run/prompts?offset=2&limit=3"))
        assert (page["found"], page["offset"], len(page["prompts"])) == (12, 2, 3)
        assert good(server.get("/api/run/prompts?search=no%20such%20text"))["found"] == 0
        assert set(good(server.get("/api/run/map"))["ids"]) == set(run.prompts.collect()["id"])
        id = page["prompts"][0]["id"]
        circuit = good(server.get(f"/api/run/circuits/{quote(id, safe='')}"))["circuit"]
        assert len(circuit["edges"]) == len(run.circuit(id).edges)
        wrong(server.get("/api/run/circuits/..%2F..%2Fetc%2Fpasswd"), 422, "input")
        assert str(tmp_path) not in good(server.get("/api/run/map"))["name"]


def test_many_clients_at_once_get_right_answers_or_are_told_to_wait(builtin) -> None:
    texts = [example.text for example in load_task("ioi", builtin.tokenizer, n_per_cell=1).spread(12)]
    expected = {text: builtin.record(text).top_answers(1)[0][1] for text in texts}
    answers: list[tuple[str, Answer]] = []
    with live(builtin, Settings(max_waiting=3)) as server:

        def ask(first: int) -> None:
            for text in texts[first:] + texts[:first]:
                answer = server.post("/api/record", {"text": text})
                answers.append((text, answer))

        clients = [Thread(target=ask, args=(first,)) for first in range(len(texts))]
        for client in clients:
            client.start()
        for client in clients:
            client.join(LONG)
    assert len(answers) == len(texts) ** 2
    assert {answer.status for _, answer in answers} <= {200, 429}
    right = [
        answer.json()["answers"][0]["id"] == expected[text]
        for text, answer in answers
        if answer.status == 200
    ]
    assert right
    assert all(right)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"text": 1e400}',
        b'{"text": "\\ud83d"}',
        b'{"text": "x", "tokens": [1]}',
        b'{"text": ""}',
        b'{"txet": "x"}',
        b'{"tokens": [' + b"9" * 5000 + b"]}",
        b'{"tokens": [999999]}',
        b'{"tokens": []}',
        b'{"text": "x", "model": 2}',
        b"\xff\xfe",
        b"null",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_prompt_is_refused_in_words(server: Live, body: bytes) -> None:
    answer = server.post("/api/record", body=body)
    assert answer.status in (400, 422), answer.body
    assert set(answer.json()) == {"code", "message"}
    assert server.logged == []


def test_a_model_that_is_not_there_is_refused(builtin) -> None:
    with live(builtin) as server:
        wrong(server.post("/api/record", PROMPT | {"model": 1}), 422, "input", "--beside")


def test_a_mistake_of_the_server_is_answered_without_its_details_and_logged(builtin, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    with live(builtin) as server:
        monkeypatch.setattr(server.app.state.session, "record", broken)
        answer = server.post("/api/record", PROMPT)
        wrong(answer, 500, "internal", "terminal")
        assert b"secret" not in answer.body
        assert "secret detail" in server.logged[0]
        monkeypatch.undo()
        good(server.post("/api/record", PROMPT))


class Busy:
    """A worker that is held until the block ends: that of traces, or the quick one."""

    def __init__(self, server: Live, lane: str = "compute") -> None:
        self.compute, self.begun, self.let_go = getattr(server.app.state, lane), Event(), Event()

    def __enter__(self) -> Busy:
        self.compute.submit(self._hold)
        assert self.begun.wait(LONG)
        return self

    def _hold(self, _: Job) -> None:
        self.begun.set()
        self.let_go.wait(LONG)

    def __exit__(self, *_: object) -> None:
        self.let_go.set()


def test_a_full_queue_is_429_with_the_time_to_wait_and_waiting_jobs_can_be_cancelled(builtin) -> None:
    with live(builtin, Settings(max_waiting=2, max_listeners=1)) as server:
        asked = {"recording": good(server.post("/api/record", PROMPT))["id"], **TRACE}
        with Busy(server):
            jobs = [good(server.post("/api/trace", asked), 202) for _ in range(2)]
            assert [job["state"] for job in jobs] == ["queued", "queued"]
            assert [job["ahead"] for job in jobs] == [1, 2]
            answer = server.post("/api/trace", asked)
            wrong(answer, 429, "busy", "waiting")
            assert int(answer.headers["retry-after"]) >= 1
            wrong(server.get(f"/api/jobs/{jobs[0]['id']}/circuit"), 409, "not_yet")
            first = server.events(jobs[1]["id"])
            assert next(first)[1:] == ("queued", {"ahead": 2})
            wrong(server.get(f"/api/jobs/{jobs[0]['id']}/events"), 429, "busy", "listen")
            assert good(server.ask("DELETE", f"/api/jobs/{jobs[0]['id']}"))["state"] == "cancelled"
            assert next(first)[1:] == ("queued", {"ahead": 1})
            wrong(server.get(f"/api/jobs/{jobs[0]['id']}/circuit"), 409, "cancelled")
            third = good(server.post("/api/trace", asked), 202)
            assert good(server.ask("DELETE", f"/api/jobs/{third['id']}"))["state"] == "cancelled"
        assert list(first)[-1][1] == "done"


def test_clicks_are_answered_while_a_trace_runs(builtin) -> None:
    with live(builtin) as server, Busy(server):
        id = good(server.post("/api/record", PROMPT))["id"]
        firing = {"layer": 2, "head": 1, "dest": 14, "src": 10}
        why = good(server.post("/api/why", {"recording": id, "firing": firing}))
        assert why["attention"] > why["threshold"]


def test_a_running_trace_that_is_cancelled_frees_the_queue(builtin, monkeypatch) -> None:
    begun, released, inner = Event(), Event(), circuits.trace

    def slow(*given: Any, progress: Any, **options: Any) -> Any:
        """The trace itself, held where it first reports progress until it is cancelled."""

        def held(done: int, of: int) -> None:
            begun.set()
            assert released.wait(LONG)
            progress(done, of)

        return inner(*given, progress=held, **options)

    with live(builtin) as server:
        monkeypatch.setattr(circuits, "trace", slow)
        job = good(server.about("trace", PROMPT, TRACE), 202)
        assert begun.wait(LONG)
        assert good(server.get(f"/api/jobs/{job['id']}"))["state"] == "running"
        server.ask("DELETE", f"/api/jobs/{job['id']}")
        released.set()
        assert list(server.events(job["id"]))[-1][1] == "cancelled"
        monkeypatch.undo()
        job = good(server.about("trace", PROMPT, TRACE), 202)
        assert list(server.events(job["id"]))[-1][1] == "done"


def test_a_client_that_goes_away_takes_its_waiting_work_back(builtin) -> None:
    with live(builtin) as server:
        compute, body = server.app.state.quick, json.dumps(PROMPT).encode()
        with Busy(server, "quick"):
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(
                    b"POST /api/record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                soon(lambda: compute.n_waiting == 1)
            soon(lambda: compute.n_waiting == 0)
        assert len(server.app.state.session.recordings) == 0


def test_a_stopping_server_ends_streams_and_tells_those_who_wait(builtin) -> None:
    answers: list[Answer] = []
    with live(builtin) as server:
        asked = {"recording": good(server.post("/api/record", PROMPT))["id"], **TRACE}
        lanes = server.app.state.compute, server.app.state.quick
        with Busy(server), Busy(server, "quick"):
            job = good(server.post("/api/trace", asked), 202)
            events = server.events(job["id"])
            next(events)
            asking = Thread(target=lambda: answers.append(server.post("/api/record", PROMPT)))
            asking.start()
            soon(lambda: all(lane.n_waiting == 1 for lane in lanes))
            for lane in lanes:
                lane.cancel_all()
            assert list(events)[-1][1] == "cancelled"
            asking.join(LONG)
            wrong(answers[0], 503, "stopping")


def soon(true: Any) -> None:
    """Wait until something is true."""
    waited, step = 0.0, 0.01
    while not true():
        Event().wait(step)
        waited += step
        assert waited < LONG
