"""Which frames of a video are used, and their size: one module for each family of video
processors."""
