"""Examples that use ROSE as an RL team would: one URL for turns, one Publisher for weights."""
