"""Softmax over a few slots that keys are averaged into."""
