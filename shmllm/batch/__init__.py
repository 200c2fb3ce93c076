"""Batch jobs on files: rows in, records out, and how an ended job goes on.

Knows files and formats. Must not know the engine, the command line or the terminal: a job
runs over anything that turns (prompt, parameters) pairs into outputs.
"""
