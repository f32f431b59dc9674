"""Limits of the explorer's server: what a client may ask for, and what is kept.

>>> Settings(max_tokens=64).max_tokens
64
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from headtrace.errors import InputError


@dataclass(frozen=True)
class Settings:
    """Every limit is a number of at least one; beyond it a client is told what to do."""

    max_tokens: int = 512
    """Tokens of a prompt. Attention maps, and what is kept of a prompt, grow with its square."""
    max_waiting: int = 32
    """Computations that may wait for their turn."""
    max_requests: int = 256
    """Requests that are answered at the same time, those that wait among them."""
    max_listeners: int = 64
    """Streams of events that are open at the same time."""
    body_bytes: int = 2_000_000
    """Bytes of a request."""
    body_seconds: int = 30
    """How long a client may take to send them."""
    cached_bytes: int = 1_000_000_000
    """Memory for recordings of recent prompts; the latest is kept whatever its size."""
    cached_recordings: int = 32
    kept_jobs: int = 32
    """Finished jobs whose circuits can still be asked for."""
    token: str | None = field(default=None, repr=False)
    """What clients must know, where others than this machine's can reach the server."""
    hosts: tuple[str, ...] = ()
    """Names under which the server is reached, besides those of the loopback."""
    loopback: bool = True
    """Whether only this machine can reach it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1 and not isinstance(value, bool):
                raise InputError(f"{each.name}={value}: expected at least 1.")
        if not self.loopback and not self.token:
            raise InputError(
                "A server that other machines can reach needs a token: give one (--token), or serve on 127.0.0.1."
            )
