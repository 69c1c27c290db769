"""Vectors after they are computed: nearest neighbours, late interaction, token pooling."""
