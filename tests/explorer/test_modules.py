"""Modules into one script: order, privacy, and refusal of what is not understood."""

from __future__ import annotations

import pytest

from headtrace.errors import HeadtraceError
from headtrace.explorer.page import inline_modules, json_for_script

MODULES = {
    "main.js": 'import { twice } from "./maths.js";\nimport { word } from "./text.js";\nexport const go = 1;',
    "maths.js": "const private_ = 2;\nexport function twice(x) {\n  return private_ * x;\n}\n",
    "text.js": 'import { twice } from "./maths.js";\nconst private_ = 3;\nexport const word = "w";\n',
}


def test_a_module_comes_after_those_it_imports_and_once():
    script = inline_modules(MODULES, "main.js", "go")
    places = [script.index(f"const ${name} =") for name in ("maths", "text", "main")]
    assert places == sorted(places)
    assert script.count("const $maths =") == 1
    assert "import {" not in script
    assert "export " not in script
    assert script == inline_modules(dict(reversed(MODULES.items())), "main.js", "go")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('import x from "./maths.js";', "cannot inline"),
        ('import { x } from "https://example.org/x.js";', "cannot inline"),
        ("export default 3;", "cannot inline"),
        ('const x = await import("./maths.js");', "cannot inline"),
        ('const x = "</script>";', "end the script"),
        ('import { x } from "./none.js";', "does not exist"),
        ('import { start } from "./main.js";', "circle"),
    ],
)
def test_what_cannot_be_inlined_is_refused(text, message):
    with pytest.raises(HeadtraceError, match=message):
        inline_modules({**MODULES, "main.js": text}, "main.js", "go")


def test_data_cannot_end_its_script_element():
    text = json_for_script({"a": "</script><!-- & \u2028\u2029 \ud800"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
