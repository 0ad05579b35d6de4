"""Operations: a folder for each, a file in it for each backend. `reference` is the truth in any precision."""
