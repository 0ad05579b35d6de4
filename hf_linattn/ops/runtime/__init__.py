"""How C and Triton are loaded, checked and called."""
