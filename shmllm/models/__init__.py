"""Model architectures: configuration, layers, weights. Knows no scheduler, cache or process."""
