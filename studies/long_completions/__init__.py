"""What corrections between sampler and trainer do with long completions; see README.md."""
