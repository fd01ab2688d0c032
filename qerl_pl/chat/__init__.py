"""Chat templates: rendering, continuation, tool calls."""
