"""What stands for an image in a prompt: one module for each family of models."""
