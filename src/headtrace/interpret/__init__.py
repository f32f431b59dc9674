"""What heads and channels look for, in words, and whether the words are right.

``examples.py`` states what a corpus showed of a signal: the token pairs that score highest, and others to tell them
from. ``scan`` reads a corpus (``corpus.py``) once and scores all signals (``signals.py``, ``scoring.py``) at all
pairs; ``atlas.py`` makes tables of what every head and its strongest channels attend to.
"""

from headtrace.interpret.atlas import Atlas, open_atlas
from headtrace.interpret.corpus import open_corpus
from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
from headtrace.interpret.scan import Scan, scan
from headtrace.interpret.signals import find_signals

__all__ = [
    "Atlas",
    "Pair",
    "Scan",
    "ScoredSignal",
    "SignalExamples",
    "find_signals",
    "open_atlas",
    "open_corpus",
    "scan",
]
