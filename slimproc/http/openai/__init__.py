"""OpenAI's routes: the schemas of their bodies, and one file per endpoint."""
