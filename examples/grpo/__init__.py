"""GRPO in plain PyTorch over turns that a RolloutLease serves.

Read in this order: ``task`` (the environment and its reward), ``client`` (one turn over HTTP),
``rollouts`` (groups in flight, bounded staleness), ``learner`` (the loss), ``evaluate`` (is the
learning real), ``publishing`` (weights out), ``run`` (what a step does), ``train`` (the loop and
its command line).
"""
