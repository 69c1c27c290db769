"""What needs the packages of the extra ``server``."""
