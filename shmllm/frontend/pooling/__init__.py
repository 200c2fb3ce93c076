"""Vectors, classes and scores of prompts: the requests, and what becomes of their rows."""
