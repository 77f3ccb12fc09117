"""The load generator behind ``slimproc bench``: it talks HTTP to any OpenAI-compatible server and knows nothing of ours."""
