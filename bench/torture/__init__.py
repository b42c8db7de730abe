"""``make torture``: make every process of the weight plane fail at every step it has.

Read in this order: ``cases`` (what is tried), ``rig`` (the processes), ``__main__`` (the matrix).
Everything runs on this machine in one temporary folder: a store, a relay, weight-sync, the fake
engine with the real weight session, and the real Publisher.
"""
