"""Scripts that measure; `python -m benchmarks.study` is the one that takes a list of runs."""
