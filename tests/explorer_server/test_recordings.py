"""What the server keeps of recent prompts stays within its bounds."""

from __future__ import annotations

import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.server.recordings import Recordings, held_bytes
from headtrace.explorer.server.settings import Settings


@pytest.fixture(scope="module")
def recording() -> headtrace.models.Recording:
    return headtrace.load("builtin").record("When Mary and John went")


def test_what_was_not_used_for_longest_goes_first(recording) -> None:
    kept = Recordings(max_bytes=10**9, max_count=2)
    kept.put("a", recording, 0)
    kept.put("b", recording, 0)
    assert kept.get("a") is not None
    kept.put("c", recording, 1)
    assert [kept.get(id) is not None for id in "abc"] == [True, False, True]
    assert kept.get("c").model == 1


def test_bytes_are_bounded_and_the_latest_stays_whatever_its_size(recording) -> None:
    size = held_bytes(recording)
    kept = Recordings(max_bytes=2 * size, max_count=10)
    for id in "abc":
        kept.put(id, recording, 0)
    assert len(kept) == 2
    assert kept.n_bytes <= 2 * size
    tight = Recordings(max_bytes=1, max_count=10)
    tight.put("a", recording, 0)
    tight.put("b", recording, 0)
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
