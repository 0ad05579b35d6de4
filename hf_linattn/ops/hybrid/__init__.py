"""Softmax near, linear attention far."""
