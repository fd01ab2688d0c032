"""Rollouts: sampling, scoring, and the log-probability parity check."""
