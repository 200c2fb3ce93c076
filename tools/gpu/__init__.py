"""What tools/gpu_check measures, one module for each idea; nothing of it is installed."""
