"""How the built-in model was made: ``text`` generates what it was trained on, ``tokenizer`` splits that into words, and
``train`` trains it (from the root of the repository: ``python -m docs.studies.builtin_model.train OUT``)."""
