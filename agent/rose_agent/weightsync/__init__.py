"""Weight-sync: keeps the engines of this node at the head of their run's weights.

Start at ``main``, then ``follower`` (one slot) and ``decide`` (what to do next).
"""
