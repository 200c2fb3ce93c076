"""Which sinusoids embed positions. This module must not import torch: front ends import it too."""

from __future__ import annotations

from typing import Literal

SinusoidKind = Literal["fairseq", "marian", "nemo"]
"""The last of n wavelengths is the longest ("fairseq"; XGLM, M2M100), or would be the one behind it
("marian"; Marian, Pegasus), also divided by the square root of the width ("nemo"; Canary)."""
