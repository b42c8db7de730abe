"""What GPUs this node has and who uses them, behind one interface.

``driver`` is the interface; ``nvml`` asks NVIDIA's library, ``static`` reads a file (machines
without GPU), ``fake_nvml`` stands in for the library itself so that the NVML driver is tested
everywhere. All drivers pass the same contract test.
"""
