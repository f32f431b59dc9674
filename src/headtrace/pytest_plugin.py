"""Claims about a model as tests of pytest: ``pytest --headtrace-model ./finetuned tests/`` runs every
``*.claims.json`` file, one test per claim.

The plugin does nothing without ``--headtrace-model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headtrace.causal.expectations import CheckedClaim


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--headtrace-model``: the model that claims are put to."""
    parser.getgroup("headtrace").addoption(
        "--headtrace-model",
        metavar="NAME_OR_FOLDER",
        help="Put the claims of *.claims.json files to this model.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Files of claims, if a model is given."""
    if parent.config.getoption("--headtrace-model") and file_path.name.endswith(".claims.json"):
        return ClaimsFile.from_parent(parent, path=file_path)
    return None


class ClaimsFile(pytest.File):
    """A file of claims: all are measured together, when the first is run."""

    _checked: tuple[CheckedClaim, ...] | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """One test per claim, from the lowest layer up."""
        from headtrace.causal.expectations import ordered, read_claims

        for number, claim in enumerate(ordered(read_claims(self.path))):
            yield ClaimItem.from_parent(self, name=str(claim), number=number)

    def checked(self, number: int) -> CheckedClaim:
        """A claim, measured."""
        if self._checked is None:
            import headtrace
            from headtrace.causal.expectations import expect

            model = headtrace.load(str(self.config.getoption("--headtrace-model")))
            self._checked = expect(self.path, model).checked
        return self._checked[number]


class ClaimItem(pytest.Item):
    """One claim."""

    def __init__(self, *, number: int, **options: Any) -> None:
        super().__init__(**options)
        self.number = number

    def runtest(self) -> None:
        """Pass if the model shows what is expected."""
        parent = self.parent
        assert isinstance(parent, ClaimsFile)
        found = parent.checked(self.number)
        if not found.passed:
            pytest.fail(str(found), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the claim is."""
        return self.path, None, self.name
