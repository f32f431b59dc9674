"""What heads and channels look for, in words, and whether the words are right.

``examples.py`` states what a corpus showed of a signal: the token pairs that score highest, and others to tell them
from. ``scan`` reads a corpus (``corpus.py``) once and scores all signals (``signals.py``, ``scoring.py``) at all
pairs; ``atlas.py`` makes tables of what every head and its strongest channels attend to, ``atlas_entries.py`` says what
they hold of one.

``protocols.py`` says what explainers and judges are; ``lexical.py`` (with ``rules.py``), ``vocabulary.py`` and
``endpoint.py`` (with ``asking.py``) are those at hand. ``judging.py`` keeps half of the examples from the explainer
and asks the judge blind, ``statistics.py`` says whether the words are right, ``controls.py`` what passes although it
should not, ``annotate.py`` writes words on circuits, ``run.py`` does it all, and ``results.py`` is what comes of it.
"""

from headtrace.interpret.annotate import annotate
from headtrace.interpret.asking import EndpointError
from headtrace.interpret.atlas import Atlas, open_atlas
from headtrace.interpret.atlas_entries import ChannelEntry, HeadEntry
from headtrace.interpret.corpus import open_corpus
from headtrace.interpret.endpoint import EndpointExplainer, EndpointJudge
from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
from headtrace.interpret.judging import Judged
from headtrace.interpret.lexical import Lexical, LiteralJudge
from headtrace.interpret.protocols import (
    Description,
    Explainer,
    Failure,
    Judge,
    make_explainer,
    make_judge,
    register_explainer,
    register_judge,
)
from headtrace.interpret.results import Interpretation
from headtrace.interpret.run import interpret, interpret_examples
from headtrace.interpret.scan import Scan, scan
from headtrace.interpret.signals import find_signals
from headtrace.interpret.statistics import Counts, Proportion
from headtrace.interpret.vocabulary import Vocabulary

__all__ = [
    "Atlas",
    "ChannelEntry",
    "Counts",
    "Description",
    "EndpointError",
    "EndpointExplainer",
    "EndpointJudge",
    "Explainer",
    "Failure",
    "HeadEntry",
    "Interpretation",
    "Judge",
    "Judged",
    "Lexical",
    "LiteralJudge",
    "Pair",
    "Proportion",
    "Scan",
    "ScoredSignal",
    "SignalExamples",
    "Vocabulary",
    "annotate",
    "find_signals",
    "interpret",
    "interpret_examples",
    "make_explainer",
    "make_judge",
    "open_atlas",
    "open_corpus",
    "register_explainer",
    "register_judge",
    "scan",
]
