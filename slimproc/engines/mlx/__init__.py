"""The MLX backend: continuous batching on mlx-lm's BatchGenerator, on Apple silicon and on Linux's CPUs."""
