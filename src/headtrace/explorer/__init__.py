"""The explorer: a circuit as a page that opens anywhere.

``page.py`` writes the HTML file, ``modules.py`` puts the modules of ``page/`` into it.
"""

from headtrace.explorer.page import page, write_page

__all__ = ["page", "write_page"]
