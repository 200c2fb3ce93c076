"""File formats that the front end and the engine both read. No module here imports torch."""
