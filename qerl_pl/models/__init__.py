"""Families of models, their folders, shapes and memory."""
