"""The llama.cpp backend: continuous batching on its low-level batch API."""
