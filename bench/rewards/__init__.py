"""Rewards and batches: how busy workers are, what rewards add to a step, what kills lose."""
