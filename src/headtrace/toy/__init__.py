"""The toy lab: models whose features are known, so that one can see what the SVD of a head finds.

`model` says what a model is to learn, what it reads and what its weights are, `train` trains many at once (with
`gradient`), `alignment` looks at the outcome and reads a head blind, `theory` has what the theorems are about.
`experiments` has them all by name.

>>> from headtrace.toy.experiments import EXPERIMENTS
>>> EXPERIMENTS["single"].shows
'one feature pair becomes the top singular pair'
"""
