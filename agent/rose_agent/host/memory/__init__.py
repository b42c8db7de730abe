"""Device memory of an engine: what it will take, what its kind was seen to take, elastic KV."""
