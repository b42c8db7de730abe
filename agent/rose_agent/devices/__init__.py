"""What GPUs this node has and who uses them, behind one interface.

``driver`` is the interface; ``nvml`` asks NVIDIA's library, ``static`` reads a file (machines
without GPU). Both pass the same contract test; ``rose_dev.gpu`` is a library for the first where
there is no GPU.
"""
