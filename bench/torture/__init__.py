"""``make torture``: make every process of the weight plane fail at every step it has.

Read in this order: ``__main__`` (what is tried, the matrix), ``rig`` (the processes).
Everything runs on this machine in one temporary folder: a store, a relay, weight-sync, the fake
engine with the real weight session, and the real Publisher.
"""
