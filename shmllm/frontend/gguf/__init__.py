"""Presents a GGUF file as a model directory, so that everything else reads only directories."""
