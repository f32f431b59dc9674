"""What heads and channels respond to, in words, and whether the words are right.

- ``corpus.py`` reads text as chunks; ``scored_signals.py`` says what signals are and scores them at pairs of tokens;
  ``scan.py`` keeps the pairs that matter, ``scan_run.py`` resumes a scan and spreads it over workers.
- ``head_roles.py`` measures heads and gives names to what they do, ``writes.py`` has what heads say through the
  unembedding and what channels read through the embedding; ``atlas.py`` makes tables of what every head and its
  strongest channels attend to.
- ``explainers.py`` says what explainers and judges are; ``lexical.py`` (with the relations of ``relations.py``,
  the classes of ``word_classes.py`` and the rules of ``rules.py``), ``writes.py`` and ``endpoint.py`` propose
  descriptions. ``chat_questions.py`` says what a language model is asked; ``answer_files.py`` keeps its answers, and
  reads and writes the files of batch services.
- ``judging.py`` has descriptions judged on pairs that the explainer did not see, in two corpora; ``verdicts.py`` says
  which are supported, and measures controls. ``interpretation.py`` does it all; ``annotate.py`` writes the descriptions
  on circuits.
"""

from headtrace.interpret.annotate import annotate
from headtrace.interpret.answer_files import BatchReport, BatchWritten, read_batch_results
from headtrace.interpret.atlas import Atlas, ChannelEntry, HeadEntry, open_atlas
from headtrace.interpret.corpus import open_corpus
from headtrace.interpret.endpoint import EndpointError, EndpointExplainer, EndpointJudge
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
from headtrace.interpret.head_roles import HeadRole, head_roles
from headtrace.interpret.interpretation import Interpretation, interpret, interpret_examples
from headtrace.interpret.judging import Counts, Judged
from headtrace.interpret.lexical import Lexical, LiteralJudge
from headtrace.interpret.relations import RELATIONS, PairView, Relation, register_relation
from headtrace.interpret.scan import Scan
from headtrace.interpret.scan_run import scan
from headtrace.interpret.scored_signals import Pair, ScoredSignal, SignalExamples, find_signals
from headtrace.interpret.writes import (
    HeadSays,
    OutputChannel,
    SaysTest,
    Vocabulary,
    check_head_says,
    head_says,
    output_channels,
)
from headtrace.statistics import Proportion

__all__ = [
    "RELATIONS",
    "Atlas",
    "BatchReport",
    "BatchWritten",
    "ChannelEntry",
    "Counts",
    "Description",
    "EndpointError",
    "EndpointExplainer",
    "EndpointJudge",
    "Explainer",
    "Failure",
    "HeadEntry",
    "HeadRole",
    "HeadSays",
    "Interpretation",
    "Judge",
    "Judged",
    "Lexical",
    "LiteralJudge",
    "OutputChannel",
    "Pair",
    "PairView",
    "Proportion",
    "Relation",
    "SaysTest",
    "Scan",
    "ScoredSignal",
    "SignalExamples",
    "Vocabulary",
    "annotate",
    "check_head_says",
    "find_signals",
    "head_roles",
    "head_says",
    "interpret",
    "interpret_examples",
    "make_explainer",
    "make_judge",
    "open_atlas",
    "open_corpus",
    "output_channels",
    "read_batch_results",
    "register_explainer",
    "register_judge",
    "register_relation",
    "scan",
]
