"""The development cluster: a real Kubernetes of one or two nodes, or its API server alone.

- ``node``, ``second_node``: bring the nodes up and down; ``namespaces``: what keeps each apart from
  the machine, and its processes; ``node_init``: its process 1; ``cgroups``: its trees.
- ``control_plane``: etcd and the API server alone. ``kwok``: nodes without machines.
- ``components``, ``node_components``, ``node_files``: command lines and files of what runs there.
- ``gpu_node``: what a node with GPUs has besides.
- ``kubectl``: the cluster as its administrator sees it. ``policies``: network policies, enforced.
- ``parts``, ``build``, ``node_packages``: what all of it is made of, and where that comes from.
- ``place``, ``pki``: names, addresses and folders; certificates.
"""
