"""Evaluation on held-out prompts: sampling, grading and metrics."""
