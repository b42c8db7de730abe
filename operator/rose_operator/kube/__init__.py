"""The API server: cached objects, watches, leadership, writes."""
