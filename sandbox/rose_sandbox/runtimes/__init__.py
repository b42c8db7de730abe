"""What runs sandboxes: siblings behind ``runtime.Runtime``, held to one contract test."""
