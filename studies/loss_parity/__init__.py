"""Losses, corrections and advantages beside TRL's and verl's own code."""
