"""The copies of models that run: their states, their processes, and what is in flight in each."""
