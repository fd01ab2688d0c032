"""Scripts that measure. Packages: `python -m benchmarks.study` takes a list of runs, `.loss_parity` compares losses."""
