"""Formats of the frozen base's weights: recognized, read and quantized; norms in float32; LoftQ's adapter."""
