"""Softmax over keys that hash alike."""
