"""Loads a model, and executes the steps that the scheduler plans."""
