"""A publisher's side: stage blocks and move the head; import checkpoints and delta directories."""
