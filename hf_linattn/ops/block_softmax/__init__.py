"""Softmax over the key blocks that a table names."""
