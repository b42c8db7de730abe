"""GPUs without a GPU: an NVML library of our own, behind the real ``pynvml`` and ``nvidia-smi``.

``nvml.c`` has NVIDIA's C ABI, ``library`` builds it, ``state`` is the file that it answers from and
that anybody may change meanwhile, ``profiles`` are the machines it can be. Next step: ``state``.
"""
