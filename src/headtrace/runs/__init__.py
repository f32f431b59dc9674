"""Many prompts: what was found on each, kept and put together.

``frames.py`` gives the circuits of any source as tables, ``roles.py`` names the positions of their nodes,
``merging.py`` puts them together into one ``Network`` (``network.py``, its files in ``network_files.py``),
``trace_network.py`` into the trace network of the 2024 paper and its skeleton. ``references.py`` holds published
circuits (``references/``), ``agreement.py`` says how far a network agrees with one.
"""
