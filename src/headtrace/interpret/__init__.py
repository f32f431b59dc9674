"""What heads and channels look for, in words, and whether the words are right.

``examples.py`` states what a corpus showed of a signal: the token pairs that score highest, and others to tell them
from.
"""

from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples

__all__ = ["Pair", "ScoredSignal", "SignalExamples"]
