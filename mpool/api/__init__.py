"""The public functions and methods of the capabilities, and the generator of their stubs."""
