"""The operator's side: this node's certificate, what is reported, what comes back."""
