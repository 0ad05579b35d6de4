"""Softmax in a sliding window."""
