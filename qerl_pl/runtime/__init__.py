"""Processes, checkpoints, files, imports by name, random states and checks of a run."""
