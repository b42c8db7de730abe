"""Sandboxes behind interfaces that harnesses have already; each needs its harness installed."""
