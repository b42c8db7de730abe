"""The trainer's side: rounds and batches, late rewards, its rhythm, who must have new weights."""
