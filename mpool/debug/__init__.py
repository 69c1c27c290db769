"""Tools that look inside: captures of activations, their comparison, the configuration."""
