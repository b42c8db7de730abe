"""What this node offers: ways to share its GPUs, models on its disk."""
