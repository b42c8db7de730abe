"""MPS as NVIDIA runs it: one daemon per node, its control pipe, and fakes under the same tests."""
