"""What heads and channels respond to, in words, and whether the words are right.

- ``corpus.py`` reads text as chunks; ``scored_signals.py`` says which signals are scored, and scores them; ``scan.py``
  keeps the pairs of tokens that matter (``examples.py``), ``scan_run.py`` saves, resumes and distributes a scan.
- ``head_measures.py`` measures heads, ``embedding_reads.py`` reads channels through the embedding; ``atlas.py`` makes
  tables of what every head and its strongest channels attend to.
- ``explainers.py`` says what explainers and judges are; ``lexical.py`` (with the rules of ``rules.py``),
  ``embedding_reads.py`` and ``endpoint.py`` propose descriptions. ``judging.py`` has them judged on pairs that the
  explainer did not see, ``verdicts.py`` tests them and their controls. ``interpretation.py`` does it all;
  ``annotate.py`` writes the words on circuits.
"""

from headtrace.interpret.annotate import annotate
from headtrace.interpret.atlas import Atlas, ChannelEntry, HeadEntry, open_atlas
from headtrace.interpret.corpus import open_corpus
from headtrace.interpret.embedding_reads import Vocabulary
from headtrace.interpret.endpoint import EndpointError, EndpointExplainer, EndpointJudge
from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
from headtrace.interpret.explainers import (
    Description,
    Explainer,
    Failure,
    Judge,
    make_explainer,
    make_judge,
    register_explainer,
    register_judge,
)
from headtrace.interpret.interpretation import Interpretation, interpret, interpret_examples
from headtrace.interpret.judging import Counts, Judged
from headtrace.interpret.lexical import Lexical, LiteralJudge
from headtrace.interpret.scan import Scan
from headtrace.interpret.scan_run import scan
from headtrace.interpret.scored_signals import find_signals
from headtrace.statistics import Proportion

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
