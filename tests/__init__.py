"""Tests, in the layout of the library."""
