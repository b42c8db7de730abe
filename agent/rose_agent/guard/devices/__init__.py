"""What the node's GPUs can give, and whether this container still reaches them."""
