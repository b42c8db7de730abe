"""Weights where they lie: digests, the codec's loops and kernels of one launch on the device."""
