"""Keeps a process alive when it loses the file behind mapped memory."""
