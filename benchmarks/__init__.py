"""Scripts that measure; `python -m benchmarks.study` runs a list of runs, `-m benchmarks.loss_parity` compares losses."""
