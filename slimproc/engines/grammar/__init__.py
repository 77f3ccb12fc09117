"""Structured output: from a GrammarSpec to the tokens that may come next."""
