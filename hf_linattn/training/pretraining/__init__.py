"""Training small models from scratch: their architectures, and rows that reward looking far back."""
