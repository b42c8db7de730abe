"""Which serving pods run on this node, and what has become of their processes.

- ``model``: one serving pod as the guard needs it.
- ``static``: pods written down in a file, for tests and benchmarks without Kubernetes.
- ``kubernetes``: list and watch of this node's pods over the API server; its loss changes nothing.
- ``processes``: the pods' processes by cgroup, watched by pidfd.
"""
