"""The toy lab: models whose features are known, so that one can see what the SVD of a head finds.

`setting` says what a model is to learn, `train` trains many at once (`gradient`, `weights`, `data`), `alignment` and
`geometry` look at the outcome, `recovery` reads a head blind; `closed_form`, `frames` and `orthogonalisation` are the
theorems, `reference` is the model written out plainly. `experiments` has them all by name.

>>> from headtrace.toy.experiments import EXPERIMENTS
>>> EXPERIMENTS["single"].shows
'one feature pair becomes the top singular pair'
"""
