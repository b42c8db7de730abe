"""What is remembered of trajectories and expected of them: ``prospects``, and what it is made of.

- ``lengths``: how much is still to be written. ``freshness``: how long until it is too old.
- ``shares``: how often turns met borrowed engines. ``inclusion``: whether that biases a batch.
- ``inference``: groups and ends that nobody has named.
"""
