"""Positions of a model: its tables, its rotary embeddings, and how they are extended."""
