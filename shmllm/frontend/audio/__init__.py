"""Sounds in prompts: opening, resampling, features. `processor.AudioProcessor` is the entrance.

No module here imports soundfile or soxr before there is a sound, and none imports torch or
transformers.
"""
