"""What stands for an item in a prompt: one module for each family of models."""
