"""What several operations are made of."""
