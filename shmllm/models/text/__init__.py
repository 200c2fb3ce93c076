"""Encoders of texts, whose results the layers of a decoder attend to."""
