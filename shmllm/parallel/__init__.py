"""Groups of processes that compute parts of the same model."""
