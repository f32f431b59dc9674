"""What a session keeps of recent prompts: addresses that can be made again, and bounds."""

from __future__ import annotations

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.panels import Session, Settings
from headtrace.explorer.panels.requests import PromptRequest
from headtrace.explorer.panels.session import NotFoundError, RecordedPrompt, Recordings, held_bytes


@pytest.fixture(scope="module")
def recording(model) -> headtrace.models.Recording:
    return model.record("When Mary and John went")


@pytest.fixture(scope="module")
def entry(recording) -> RecordedPrompt:
    return RecordedPrompt(PromptRequest(text="When Mary and John went"), recording)


def test_a_prompt_is_recorded_once_and_again_under_the_same_id_once_it_was_dropped(model) -> None:
    session = Session([model], Settings(cached_recordings=1))
    prompt, other = PromptRequest(text="When Mary and John went"), PromptRequest(text="When Tom")
    first = session.record(prompt)
    assert session.record(prompt) is first is session.recorded(first.id)
    session.record(other)
    with pytest.raises(NotFoundError, match="Record the prompt again") as gone:
        session.recorded(first.id)
    assert gone.value.code == "not_kept"
    assert session.record(prompt).id == first.id


def test_prompts_that_differ_in_anything_have_addresses_of_their_own(model) -> None:
    session = Session([model, model])
    ids = model.to_ids("When Mary")
    prompts = [{"text": "When Mary"}, {"tokens": ids}, {"text": "When Mary", "model": 1}, {"text": "When"}]
    found = [session.record(PromptRequest(**each)) for each in prompts]
    assert len({each.id for each in found}) == len(found)
    assert found[1].recording.top_answers(1) == found[0].recording.top_answers(1)


def test_what_was_not_used_for_longest_goes_first(entry) -> None:
    kept = Recordings(max_bytes=10**9, max_count=2)
    kept.put("a", entry)
    kept.put("b", entry)
    assert kept.get("a") is not None
    kept.put("c", entry)
    assert [kept.get(id) is not None for id in "abc"] == [True, False, True]


def test_bytes_are_bounded_and_the_latest_stays_whatever_its_size(entry) -> None:
    size = held_bytes(entry.recording)
    kept = Recordings(max_bytes=2 * size, max_count=10)
    for id in "abc":
        kept.put(id, entry)
    assert len(kept) == 2
    assert kept.n_bytes <= 2 * size
    tight = Recordings(max_bytes=1, max_count=10)
    tight.put("a", entry)
    tight.put("b", entry)
    assert len(tight) == 1
    assert tight.get("b") is not None


def test_what_is_derived_from_a_recording_counts_too(recording) -> None:
    fresh = recording[0]
    before = held_bytes(fresh)
    derived = fresh.shared_values
    assert held_bytes(fresh) == before + derived.numel() * derived.element_size()
    assert before > fresh.n_bytes, "so do masks"


def test_limits_are_sensible_and_a_server_for_others_needs_a_token() -> None:
    with pytest.raises(InputError, match="max_tokens=0"):
        Settings(max_tokens=0)
    with pytest.raises(InputError, match="needs a token"):
        Settings(loopback=False)
    assert "sesame" not in repr(Settings(token="open sesame, please"))
