"""What runs a model on a GPU: kernels launched eagerly, or replayed from captured graphs."""
