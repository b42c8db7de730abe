"""A fake SGLang: the same HTTP and control faces, a deterministic function instead of a model.

Tests and the simulator run it where a real engine would be too slow; the contract tests in
``tests/engines`` hold the two to the same behaviour. ``model`` is the function, ``scheduler`` the
loop with permit and weights, ``server`` the HTTP face, ``python -m rose_engines.fake`` the process.
"""
