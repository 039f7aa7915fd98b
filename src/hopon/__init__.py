"""Continuous batching for language models on CPUs."""
