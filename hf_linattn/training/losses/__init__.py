"""What is trained for: attention transfer, layer by layer or by blocks, and distillation from the original."""
