"""Numerics: `naive` holds the truth in any precision, every other file one operation."""
