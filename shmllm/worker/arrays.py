"""Names for the types of the arrays that the worker's modules share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
SeedArray = npt.NDArray[np.uint64]
WordArray = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float32]
