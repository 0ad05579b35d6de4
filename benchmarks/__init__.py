"""Benchmarks: `measure` times and counts, `studies` ask one question each, `render` writes the tables of `results`."""
