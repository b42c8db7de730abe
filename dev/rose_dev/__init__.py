"""One-node Kubernetes, images and small models for development and tests.

- ``main``: ``rose dev``. ``cluster``: the nodes and what they are made of. ``gpu``: GPUs that are
  not there.
- ``testing``, ``engine_testing``, ``kernel_cache``, ``watchdog``: pytest fixtures and hooks.
- ``waiting``, ``owners``, ``models``, ``shell``: what tests and benchmarks share.
- ``image``, ``release``, ``image_sizes``: images, made here. ``*_parts``: what ``make`` installs.
- ``generate``: pages and manifests that come from the code. ``dashboards``: Grafana's.
- ``contained``: runs a command and ends whatever it leaves behind.
"""
