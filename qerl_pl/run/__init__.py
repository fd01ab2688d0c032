"""What makes a run whole and repeatable: its files, checkpoints, random streams and devices."""
