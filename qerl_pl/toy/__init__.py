"""The embedded default: a synthetic task, a small tokenizer and a small policy that is mediocre at the task."""
