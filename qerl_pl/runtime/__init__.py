"""Processes, checkpoints, files, random states and checks of a run."""
