"""How images become tiles of pixels: one module for each family of image processors."""
