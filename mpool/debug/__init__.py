"""Tools for debugging: comparison of captured activations, and tables of models and of the configuration."""
