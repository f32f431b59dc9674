"""The code of the how-to pages that stand alone runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


@pytest.mark.parametrize("name", ["trace-many-prompts"])
def test_the_code_of_a_page_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES / f"{name}.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": name}
    for block in blocks:
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
    said = capsys.readouterr().out
    for line in re.findall(r"^#( .*)$", "".join(blocks), re.MULTILINE):  # what a block says that it prints
        assert line[1:] in said
    assert "only a part of it is here" in said
