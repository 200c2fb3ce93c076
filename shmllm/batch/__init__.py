"""Batch jobs on files: reads rows, writes records, and resumes interrupted jobs.

This package knows files and formats. It must not know the engine, the command line or the terminal:
a job runs on any function that turns (prompt, parameters) pairs into outputs.
"""
