"""The live explorer: ``headtrace serve MODEL``, one process, in the browser, nothing sent anywhere."""
