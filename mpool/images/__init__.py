"""Reads images and prepares them for a model. Pillow is imported on first use."""
