"""The study: the paper's claims put to the test, by many runs of `qerl fit`; see benchmarks/README.md."""
