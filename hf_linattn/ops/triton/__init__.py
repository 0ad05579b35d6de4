"""Operations on GPUs, in Triton; its interpreter runs them on a CPU for the tests."""
