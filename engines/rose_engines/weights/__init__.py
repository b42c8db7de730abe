"""New weights of a running engine: read, checked, committed between two iterations, attested."""
