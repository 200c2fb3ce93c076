"""Plugins: code of other packages that front ends and engines find by entry points or by name, and
the interfaces that it implements.

This package imports no torch and must not know what calls the plugins.
"""
