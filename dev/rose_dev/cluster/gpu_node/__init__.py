"""The GPU side of the development node: NVIDIA's own parts around GPUs that are not there.

| part | from |
|---|---|
| NVML | ``rose_dev.gpu``, a library with NVIDIA's ABI |
| nvidia-smi, libcuda, MPS | Debian's non-free, two versions (``driver_root``) |
| nvidia-ctk, nvidia-container-runtime, its CDI hook, its NRI plugin | Go modules of the toolkit |
| containerd 2 with CDI and NRI | Go modules |
| device plugin | ``go/device-plugin``, over the kubelet's own API |

Next step: ``driver_root`` lays out the driver, ``starting`` brings all of it up in a node.
"""
