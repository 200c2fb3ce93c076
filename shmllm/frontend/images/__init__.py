"""Images in prompts: opening, resizing, placeholders. `processor.ImageProcessor` is the entrance.

No module here imports pillow before there is an image, and none imports torch or transformers.
"""
