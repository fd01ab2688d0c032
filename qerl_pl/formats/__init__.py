"""The frozen base model: its files, the formats of its weights, and what of its structure is relied on."""
