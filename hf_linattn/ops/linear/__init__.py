"""Linear attention: kernels of feature maps."""
