"""What was published: versions, their blocks and the backends that keep them."""
