"""What the explorer shows, computed: from a model, a recording and a request to the schemas' answers.

Plain functions, without a server: ``prompts.py`` (a recorded prompt), ``why.py`` (one firing), ``tracing.py`` (a
circuit, while it grows), ``changing.py`` (interventions), ``runs.py`` (a run and its families), ``tasks.py``,
``evidence.py`` (what an atlas says of a channel). ``snippets.py`` has the Python lines that compute the same.
"""
