"""One-node Kubernetes, images and small models for development and tests.

- ``main``: ``rose dev``. ``node``, ``second``: the nodes; ``control_plane``: the API server alone.
- ``testing``, ``engine_testing``, ``kernel_cache``, ``watchdog``: pytest fixtures and hooks.
- ``waiting``, ``owners``, ``models``, ``shell``: what tests and benchmarks share.
- ``image``, ``build``, ``parts``: images and the parts of Kubernetes, made here.
- ``generate``: pages and manifests that come from the code. ``dashboards``: Grafana's.
- ``contained``: runs a command and ends whatever it leaves behind.
"""
