"""Operations in C for CPUs: each a `.c` and the Python that calls it; `library` loads what was built."""
