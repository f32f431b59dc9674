"""The README as the package's page on PyPI shows it.

PyPI has neither the pictures nor the pages that the README names by their paths in the repository. Where the address
of the repository is known (GitHub's workflows set GITHUB_REPOSITORY), paths become addresses of the released version.
Elsewhere a picture is left out, and a link becomes its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Fills in the ``readme`` of the package's metadata."""

    def update(self, metadata: dict) -> None:
        text, code = (
            Path(self.root, name).read_text(encoding="utf-8")
            for name in ("README.md", "src/headtrace/__init__.py")
        )
        version = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)
        assert version
        shown = for_pypi(text, os.environ.get("GITHUB_REPOSITORY"), f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}


def for_pypi(text: str, repository: str | None, tag: str) -> str:
    """A page of the repository whose paths are addresses, or, without a repository, are left out."""

    def placed(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["image"] else link["text"]
        if link["image"]:
            address = f"https://raw.githubusercontent.com/{repository}/{tag}/{link['target']}"
        else:
            address = f"https://github.com/{repository}/blob/{tag}/{link['target']}"
        return f"{link['image']}[{link['text']}]({address})"

    return _LINK.sub(placed, text)
