"""HTTP of the data plane: routes, dialects, replies, who may call."""
