"""What stands behind a request's messages: conversations, and the tokens sampled under them."""
