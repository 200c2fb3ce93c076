"""Videos in prompts: opening, choosing frames. `processor.VideoProcessor` is the entrance.

No module here imports pillow or PyAV before there is a video, and none imports torch or
transformers.
"""
