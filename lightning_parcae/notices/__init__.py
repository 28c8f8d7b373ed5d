"""Warnings that an instance is about to be taken away."""
