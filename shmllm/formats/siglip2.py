"""What front ends and engines know of SigLIP 2 for images of any size (Tschannen et al., 2025)."""

from __future__ import annotations

MOST_PATCHES = 4096
"""Four times those of the longest sequences that it was trained on."""
