"""The command line: one thin module per command; models and torch are imported only when a command runs."""

from headtrace.cli.main import app, main

__all__ = ["app", "main"]
